"""Operations belong to the innermost scope of the model, and their own time is that without what ran inside them."""

import dataclasses

import pytest

from ksana_jax.lab.trace.parts import OTHER, Operation, part_of, parted, parts_of_operations, seconds_by_part

HLO = """HloModule jit_step_layers, is_scheduled=true
%fused (p: f32[2]) -> f32[2] {
  ROOT %tanh.1 = f32[2]{0} tanh(%p), metadata={op_name="jit(step_layers)/mlp/tanh" stack_frame_id=8}
}
ENTRY %main {
  %copy.5 = f32[2]{0} copy(%x)
  %while.2 = f32[2]{0} while(%x), metadata={op_name="jit(step_layers)/attention/while" stack_frame_id=3}
  %add.7 = f32[2]{0} add(%x, %x), metadata={op_name="jit(step_layers)/add" stack_frame_id=3}
  ROOT %fusion.3 = f32[2]{0} fusion(%x), calls=%fused, metadata={op_name="jit(step_layers)/mlp/norm/mul"}
}
"""


@dataclasses.dataclass
class Program:
    module: str
    parts: dict


def test_the_innermost_scope_of_the_model_counts():
    assert part_of("jit(step_layers)/mlp/norm/mul") == "norm"
    assert part_of("jit(step_whole)/layer3/kv_write/rope/cos") == "rope"
    assert part_of("jit(step_layers)/while/body/add") == part_of("") == OTHER
    assert parts_of_operations(HLO) == {"tanh.1": "mlp", "while.2": "attention", "fusion.3": "norm"}


def ran(name, start, end, *, line="a", program=1, module="jit_step_layers"):
    return Operation(line, module, program, name, start * 1e9, end * 1e9)


def test_an_operation_has_the_time_that_others_inside_it_do_not_have():
    program = Program("jit_step_layers", parts_of_operations(HLO))
    # The loop runs a fusion twice; on another line an operation runs at the same time.
    runs = [ran("while.2", 0, 10), ran("fusion.3", 1, 3), ran("fusion.3", 4, 7), ran("fusion.3", 10, 11)]
    runs += [ran("copy.5", 2, 6, line="b"), ran("unknown", 0, 1, line="c", module="jit_other")]
    assert seconds_by_part(parted(runs, [program])) == pytest.approx({"norm": 6, "attention": 5, OTHER: 5})


def test_of_programs_with_one_name_those_that_have_the_operations_decide():
    one = Program("jit_step_layers", {"fusion.1": "mlp", "fusion.2": "qkv"})
    other = Program("jit_step_layers", {"fusion.1": "attention", "fusion.3": "output"})
    runs = [ran("fusion.1", 0, 1), ran("fusion.2", 1, 3), ran("fusion.1", 0, 1, program=2, line="b")]
    runs.append(ran("fusion.3", 1, 3, program=2, line="b"))
    found = seconds_by_part(parted(runs, [one, other]))
    assert found == pytest.approx({"qkv": 2, "attention": 1, "output": 2, "mlp": 1})


def test_without_a_profile_there_is_nothing():
    assert seconds_by_part(parted([], [Program("m", {})])) == {}
