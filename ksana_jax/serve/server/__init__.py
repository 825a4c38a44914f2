"""An OpenAI-compatible HTTP server around AsyncLLM; extra `server`."""
