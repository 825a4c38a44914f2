"""Tool calls in the texts of models: one parser for each way to write them."""
