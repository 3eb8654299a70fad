"""The operators: registered with torch.library, their public functions, and explain."""
