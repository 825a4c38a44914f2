"""The engine loop, which serves requests: schedule, execute, update. `llm.LLM` is its public interface."""
