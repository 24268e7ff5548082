"""AMD CDNA3 (MI300X) as a device, in Triton."""
