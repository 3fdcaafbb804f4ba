"""All-reduce of buffers in device memory, by NCCL through cupy."""
