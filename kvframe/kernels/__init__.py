"""Kernels: what runs store and attend on a device. Which there are is said by the files of conf/kernel/."""
