"""A trained model as a folder for the Hugging Face hub, or as a GGUF file."""
