"""What stands in for libraries that need a device: plain torch, written from their documentation, strict about it."""
