"""What users would run instead, in plain PyTorch; each file is a script of its own."""
