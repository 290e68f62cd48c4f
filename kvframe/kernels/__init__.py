"""Kernels: what runs store and attend on a device."""
