"""What backends share because hardware does not change it. Imports no device and, outside `kernels/`, no triton."""
