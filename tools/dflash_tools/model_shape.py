"""What a plan must know of a model: its matrices, tables and caches, by size alone."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WeightForm:
    """How the numbers of a matrix are stored."""

    kind: str
    """fp32, fp16, bf16, int8, int4 or fp8."""
    group_size: int | None = None
    """Inputs that share a scale; None for one scale an output, and for floats."""
    symmetric: bool = True
    """Without zero points."""

    @property
    def words(self) -> str:
        """The form as a person says it."""
        group = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"{self.kind}{group}{'' if self.symmetric else ' with zero points'}"


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Weights of linear layers of one shape."""

    rows: int
    """Output features."""
    columns: int
    """Input features; groups lie along them."""
    count: int = 1
    quantisable: bool = True
    modules: tuple[str, ...] = ()
    """What they are called, `{}` for the number of the layer: `model.layers.{}.self_attn.q_proj`."""
    form: WeightForm | None = None
    """As the checkpoint brings them; None where that is up to the build."""

    @property
    def elements(self) -> int:
        """Parameters of all of them."""
        return self.rows * self.columns * self.count

    @property
    def names(self) -> list[str]:
        """Of each, layer by layer."""
        return [name.format(i) for i in range(self.count // max(1, len(self.modules))) for name in self.modules]


@dataclasses.dataclass(frozen=True)
class KvLayer:
    """The cache of one layer."""

    kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    """Only the last so many rows are read; memory is kept for all."""

    @property
    def row_elements(self) -> int:
        """Elements one token adds, key and value."""
        return 2 * self.kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder by its sizes; a drafter has no tables of its own."""

    name: str
    family: str
    """`model_type` of its config."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    matrices: tuple[Matrix, ...]
    """Linear layers without the output head."""
    vector_elements: int
    """Norms and biases."""
    embedding_elements: int
    head_elements: int
    """0 where the head is the embedding table, or is borrowed."""
    kv_layers: tuple[KvLayer, ...]
    max_position_tokens: int | None
    stored_precision: str | None = None
    """fp32, fp16 or bf16 as the config states it."""
    notes: tuple[str, ...] = ()
    head_form: WeightForm | None = None
    """Of the head, or of a tied table, as the checkpoint brings it; None where that is up to the build."""

    @property
    def quantised_as(self) -> tuple[str, ...]:
        """In words, what the checkpoint brings quantised already."""
        forms = [matrix.form for matrix in self.matrices] + [self.head_form]
        return tuple(dict.fromkeys(form.words for form in forms if form is not None))

    @property
    def matrix_elements(self) -> int:
        """Parameters of the linear layers without the output head."""
        return sum(matrix.elements for matrix in self.matrices)

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied table once."""
        return self.matrix_elements + self.vector_elements + self.embedding_elements + self.head_elements


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """A drafter: a decoder body, and the matrix that fuses the taps."""

    body: ModelShape
    fuse: Matrix
    """`fc`, [hidden, taps * hidden]; a build leaves it in floats."""
    block_size: int
    num_taps: int
    assumed: bool = False
    """No drafter was given: the paper's five layers at the target's width."""

    @property
    def num_parameters(self) -> int:
        """What the drafter brings itself; embedding and head are the target's."""
        return self.body.num_parameters + self.fuse.elements
