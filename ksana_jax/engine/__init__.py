"""The loop that serves requests: schedule, execute, update. `llm.LLM` is its front door."""
