"""DPH-RL in pure PyTorch: reinforcement learning that rehearses what the model already knew."""
