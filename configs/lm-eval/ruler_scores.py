"""Scores of RULER (arXiv:2404.06654, section 4): the fraction of the expected outputs that occur in the answer."""


def recall(doc: dict, results: list[str]) -> dict[str, float]:
    """Compares without regard to case."""
    answer = results[0].lower()
    return {"recall": sum(output.lower() in answer for output in doc["outputs"]) / len(doc["outputs"])}
