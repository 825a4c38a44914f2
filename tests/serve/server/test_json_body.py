"""Bodies are parsed in a time that grows with their size."""

import time

import pytest

from ksana_jax.serve.server.errors import APIError
from ksana_jax.serve.server.json_body import parse_object


def test_a_key_that_appears_twice_at_the_end_of_many_is_found_in_linear_time():
    keys = b",".join(b'"%d":0' % key for key in range(30_000))
    began_s = time.thread_time()  # other processes do not count
    with pytest.raises(APIError, match="key '29999' appears twice"):
        parse_object(b"{" + keys + b',"29999":1}')
    assert time.thread_time() - began_s < 1
