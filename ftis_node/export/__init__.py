"""A trained model or its rollouts as a folder for the Hugging Face hub."""
