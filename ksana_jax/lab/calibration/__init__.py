"""Measures numbers about a model on a text, for methods that read them: `ksana calibrate`.

A kind is a function (params, config, tokens [n, T]) -> arrays by name, with an entry for each layer.
"""

KINDS: dict[str, str] = {
    "duoattention": "ksana_jax.models.retrieval:duoattention",
    "expected_attention": "ksana_jax.lab.calibration.queries:expected_attention",
    "kvquant": "ksana_jax.lab.calibration.levels:kvquant",
    "qfilter": "ksana_jax.lab.calibration.queries:qfilter",
}
