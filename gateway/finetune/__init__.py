"""Files and fine-tuning jobs of OpenAI's API."""
