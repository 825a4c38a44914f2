"""Studies with their results, comparisons with other engines, and the script for a first day with a GPU."""
