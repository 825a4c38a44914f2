"""Messages between processes keep plain values and arrays, and can hold nothing else."""

import json
import socket
import struct
import threading
import time

import hypothesis
import hypothesis.extra.numpy as numbers
import hypothesis.strategies as st
import numpy as np
import pytest

from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.engine.distributed.driver import KINDS
from ksana_jax.engine.distributed.wire import Channel, Closed, encoded
from ksana_jax.kv.moves import Evictions, Moves
from ksana_jax.runner.decode_loop import LoopKey
from ksana_jax.scheduler.step.settings import SamplingArrays
from ksana_jax.scheduler.step.types import StepArrays, StepInput, StepShape, TileGroup


def pair() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        left = socket.create_connection(listening.getsockname())
        right, _ = listening.accept()
    return Channel(left, KINDS), Channel(right, KINDS)


def arrived(message):
    left, right = pair()
    sending = threading.Thread(target=left.send, args=(message,))  # more than the sockets' buffers may hold
    sending.start()
    found = right.receive()
    sending.join()
    left.close()
    with pytest.raises(Closed):
        right.receive()
    right.close()
    return found


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


ARRAYS = numbers.arrays(
    st.sampled_from([np.int32, np.uint32, np.float32, np.bool_, np.uint8]), numbers.array_shapes(min_dims=0, min_side=0)
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | ARRAYS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@hypothesis.given(PLAIN)
@hypothesis.settings(max_examples=60)
def test_a_message_arrives_as_it_was_sent(message):
    assert same(arrived(message), message)


def test_a_step_arrives_as_it_was_sent():
    shape = StepShape((TileGroup(4, 1), TileGroup(2, 16)), 8, 6)
    pairs, ints = np.arange(6, dtype=np.int32).reshape(3, 2), np.arange(3, dtype=np.int32)
    moves = Moves(pairs, pairs[:0], pairs[1:], [Evictions(pairs, pairs, *[ints] * 7)], [1])
    dense = (np.ones((2, 9), np.int32), np.zeros((2, 9), bool), np.ones((2, 9), np.float32))
    sampling = SamplingArrays(*[np.ones(2, np.float32)] * 10, *dense)
    step = StepInput(shape, StepArrays(*[pairs] * 7), 2, 6, sampling, moves=moves)
    found = arrived(("step", 3, step))[2]
    assert type(found) is StepInput and found.shape == shape and hash(found.shape) == hash(shape)
    assert type(found.shape.parts[1]) is TileGroup and type(found.moves.evictions[0]) is Evictions
    assert list(found.moves.num_early) == [1]
    assert same(tuple(found.arrays), tuple(step.arrays)) and same(tuple(found.sampling), tuple(sampling))
    assert (found.num_sampled, found.num_attended, found.targets, found.acceptance) == (2, 6, None, "sampled")
    assert same(vars(found.moves)["loads"], pairs[1:]) and same(
        tuple(found.moves.evictions[0]), tuple(moves.evictions[0])
    )
    key, pattern = LoopKey(shape, 4, False, None), AttentionPattern(window=8)
    assert arrived([key, pattern, ("score", 4, 2)]) == [key, pattern, ("score", 4, 2)]


@pytest.mark.parametrize("message", [object(), {1, 2}, np.array([object()]), np.array(["text"]), len, b"bytes"])
def test_what_is_not_plain_is_not_sent(message):
    with pytest.raises(TypeError):
        encoded([message], KINDS)


@pytest.mark.parametrize(
    "header",
    [
        b"no json",
        json.dumps([{"kind": "Popen", "of": ["ls"]}, []]).encode(),
        json.dumps([{"array": 0}, [["object", [1]]]]).encode(),
        json.dumps([{"array": 0}, [["int32", [-1]]]]).encode(),
        json.dumps([{"array": 0}, [["int32", [2**40]]]]).encode(),
        json.dumps([{"array": 5}, []]).encode(),
        json.dumps([{"kind": "TileGroup", "of": [1, 2, 3]}, []]).encode(),
        json.dumps([{"array": 0}, [["int32", [1] * 100_000]]]).encode(),
        json.dumps([{"array": 0}, [["int32", 4]]]).encode(),
        json.dumps([{"dict": [[[1], 2]]}, []]).encode(),
        json.dumps([{"tuple": 3}, []]).encode(),
        json.dumps([{"kind": ["TileGroup"], "of": []}, []]).encode(),
        b"[" * 60 + b"]" * 60,
        b"[" * 100_000,
        b'[{"dict":[[1,' * 5000,
    ],
)
def test_what_is_no_message_closes_the_connection(header):
    left, right = pair()
    left.socket.sendall(struct.pack(">Q", len(header)) + header)
    with pytest.raises(Closed, match="no message"):
        right.receive()
    left.close()
    right.close()


def test_a_message_may_be_nested_as_deep_as_settings_are():
    message = 1
    for level in range(14):
        message = [message] if level % 2 else {"a": message}
    assert arrived(message) == message


def test_receiving_ends_at_the_deadline_however_slowly_bytes_arrive():
    left, right = pair()
    right.deadline = time.monotonic() + 0.2
    stop = threading.Event()

    def drip():
        message = b"".join(encoded([0] * 100))
        for byte in message:
            if stop.wait(0.02):
                return
            left.socket.sendall(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(Closed, match="timed out"):
        right.receive()
    stop.set()
    dripping.join()
    left.close()
    right.close()


def test_a_length_beyond_all_messages_is_refused_before_there_is_memory_for_it():
    left, right = pair()
    left.socket.sendall(struct.pack(">Q", 2**60))
    with pytest.raises(Closed, match="no message"):
        right.receive()
    left.close()
    right.close()
