"""PTX as text becomes instructions."""

import pytest

from tests.emulator.parser import parse, split

TEXT = """
.version 9.0
.visible .entry twice(
  .param .u64 .ptr .align 256 twice_param_0,   // an array
  .param .align 64 .b8 twice_param_1[384]
)
.maxntid 128, 2, 1
{
  .reg .pred   %p<3>;
  .reg .b32   %r<4>;
$L__begin:
  .loc  1 106 0
  @!%p1 bra   $L__begin;
  // begin inline asm
  {
  .reg .pred       P1;
  LAB_WAIT:
  .loc  1 114 55
  mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, %r3;
  @P1 bra.uni DONE;
  bra.uni     LAB_WAIT;
  DONE:
  }
  // end inline asm
  { .reg .b32 s<2>; mov.b32 s1, {%r1,
      %r2}; mov.b32 %r3, s1; }
  { .reg .b32 s<2>; mov.b32 s1, 7; }
  ret;
}
"""


def test_instructions_have_operands_predicates_and_lines():
    program = parse(TEXT)
    assert program.name == "twice" and program.num_threads == 256
    assert program.params == {"twice_param_0": 8, "twice_param_1": 384}
    branch, wait, done, *_ = program.instructions
    assert (branch.op, branch.operands, branch.predicate, branch.negated) == ("bra", ("$L__begin",), "%p1", True)
    assert TEXT.splitlines()[branch.line - 1].strip().startswith("@!%p1")
    assert wait.operands[1:] == ("[%r1]", "%r2", "%r3")
    assert TEXT.splitlines()[wait.line - 1].strip().startswith("mbarrier")
    assert done.predicate == wait.operands[0]


def test_blocks_of_inline_assembly_have_names_of_their_own():
    program = parse(TEXT)
    moves = [i for i in program.instructions if i.op == "mov.b32"]
    assert moves[0].operands[1] == "{%r1, %r2}" and moves[1].operands == ("%r3", moves[0].operands[0])
    assert moves[2].operands[0] != moves[0].operands[0]
    assert program.widths[moves[0].operands[0]] == 32 and program.widths["%p2"] == 1
    ends = [i.operands[0] for i in program.instructions if i.op == "bra.uni"]
    lands = [program.instructions[program.labels[x]].parts[0] for x in ends]
    assert lands == ["mov", "mbarrier"]


def test_operands_are_split_outside_of_brackets():
    assert split("{%r1, %r2}, [%rd1, {%r3,%r4} ], (0xf0 & 0xcc) ^ 0xaa") == [
        "{%r1, %r2}",
        "[%rd1, {%r3,%r4} ]",
        "(0xf0 & 0xcc) ^ 0xaa",
    ]


def test_a_text_without_a_kernel_is_an_error():
    with pytest.raises(ValueError, match=r"no \.entry"):
        parse(".version 9.0")
