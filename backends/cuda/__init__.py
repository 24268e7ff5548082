"""NVIDIA Hopper (H100, H200) as a device, in Triton."""
