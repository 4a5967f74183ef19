"""Runs a graph in ONNX Runtime piece by piece, its weights fed as inputs: a layer of any size in little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import helper

from dflash_export.graph_pieces import PIECE_ELEMENTS, Piece, cut_graph, reads
from dflash_runtime.bundle import StateTensor
from dflash_runtime.errors import UnsupportedModelError

Array = npt.NDArray[np.generic]
ReadWeight = Callable[[onnx.TensorProto, slice], ort.OrtValue]
"""Gives some rows of an initializer in the element type it states."""
_Values = dict[str, ort.OrtValue]
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


class PiecewiseRunner:
    """A graph cut where its weights have grown to a limit; each piece is opened, run for all calls, and closed."""

    def __init__(self, model: onnx.ModelProto, read: ReadWeight, state: Sequence[StateTensor]) -> None:
        """Cuts the graph; nothing is read yet.

        Args:
            model: Its weights are the initializers with external data; they are not read from there.
            read: Called once for every piece that uses the weight.
            state: Caches that go from call to call.
        """
        self._model, self._read, self._state = model, read, {tensor.output: tensor.input for tensor in state}
        stored = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
        self._weights = {tensor.name: _widened(tensor, model.graph) for tensor in stored}
        self._constants = {t.name: t for t in model.graph.initializer if t.name not in self._weights}
        self._pieces = cut_graph(model.graph, self._weights, self._state.values())

    def run(
        self, calls: Sequence[Mapping[str, Array]], first_state: Mapping[str, Array] | None = None
    ) -> list[dict[str, Array]]:
        """Runs calls one after the other, the caches moving on.

        Args:
            calls: Inputs by name, without the caches.
            first_state: Caches before the first call, by input name.

        Returns:
            Outputs of each call by name.
        """
        caches = {name: _value(array) for name, array in (first_state or {}).items()}
        known = [{name: _value(array) for name, array in call.items()} for call in calls]
        outputs = [value.name for value in self._model.graph.output]
        for number, piece in enumerate(self._pieces):
            later = set(reads(node for rest in self._pieces[number + 1 :] for node in rest.nodes))
            made = [name for node in piece.nodes for name in node.output if name in later or name in outputs]
            if piece.sliced is None:
                self._run_whole(piece, made, known, caches)
            else:
                self._run_in_parts(piece, piece.sliced, known)
            for values in known:
                for name in values.keys() - later - set(outputs):
                    del values[name]
        return [{name: np.array(values[name].numpy()) for name in outputs} for values in known]

    def _run_whole(self, piece: Piece, made: list[str], known: list[_Values], caches: _Values) -> None:
        inside = {name for node in piece.nodes for name in node.output}
        read = [name for name in dict.fromkeys(reads(piece.nodes)) if name not in inside | self._constants.keys()]
        state = {out: name for out, name in self._state.items() if name in read and out in inside}
        sized = {name for node in piece.nodes if node.op_type == "Shape" for name in node.input}
        elsewhere = (set(read) & set(self._state.values())) - set(state.values())
        if elsewhere - sized:
            raise UnsupportedModelError(f"{sorted(elsewhere - sized)} are read apart from where they are written")
        fixed = {name: self._read(self._weights[name], slice(None)) for name in read if name in self._weights}
        fixed |= {name: caches[name] for name in {*state.values(), *elsewhere}}
        session = self._open(piece, {name: fixed.get(name) or known[0][name] for name in read}, made)
        for values in known:
            feeds = {name: fixed.get(name) or values[name] for name in read}
            values.update(zip(made, session.run_with_ort_values(made, feeds), strict=True))
            fixed |= {name: values[out] for out, name in state.items()}

    def _run_in_parts(self, piece: Piece, matrix: str, known: list[_Values]) -> None:
        """One product, some rows of its matrix at a time; what turns and converts them runs once for all calls."""
        turning, product = Piece(piece.nodes[:-1]), Piece(piece.nodes[-1:])
        left, right = product.nodes[0].input[:2]
        out = product.nodes[0].output[0]
        tensor = self._weights[matrix]
        step = max(1, PIECE_ELEMENTS // math.prod(tensor.dims[1:]))
        sessions: dict[int, tuple[ort.InferenceSession | None, ort.InferenceSession]] = {}
        parts: list[list[Array]] = [[] for _ in known]
        for start in range(0, tensor.dims[0], step):
            part = self._read(tensor, slice(start, min(start + step, tensor.dims[0])))
            rows = part.shape()[0]
            turn, multiply = sessions.get(rows) or (None, None)
            if turn is None and turning.nodes:
                turn = self._open(turning, {matrix: part}, [right])
            if turn is not None:
                (part,) = turn.run_with_ort_values([right], {matrix: part})
            if multiply is None:
                multiply = self._open(product, {right: part, left: known[0][left]}, [out])
            sessions[rows] = turn, multiply
            for values, results in zip(known, parts, strict=True):
                (result,) = multiply.run_with_ort_values([out], {right: part, left: values[left]})
                results.append(np.array(result.numpy()))  # a view does not keep its memory
        for values, results in zip(known, parts, strict=True):
            values[out] = _value(np.concatenate(results, axis=-1))

    def _open(self, piece: Piece, given: _Values, made: list[str]) -> ort.InferenceSession:
        used = set(reads(piece.nodes))
        graph = helper.make_graph(
            piece.nodes,
            "piece",
            [helper.make_tensor_value_info(n, v.element_type(), self._dims(n, v)) for n, v in given.items()],
            [onnx.ValueInfoProto(name=name) for name in made],
            [tensor for name, tensor in self._constants.items() if name in used],
        )
        model = onnx.ModelProto(ir_version=self._model.ir_version, graph=graph)
        model.opset_import.extend(self._model.opset_import)
        options = ort.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = False  # what a piece held goes back to the system at once
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def _dims(self, name: str, value: ort.OrtValue) -> list[int | None]:
        """Weights have their size, everything else only as many dimensions as it has."""
        return list(value.shape()) if name in self._weights else [None] * len(value.shape())


class PiecewiseGraph:
    """The same, called like a `GraphRunner`: one call at a time, the caches kept in `state`."""

    def __init__(
        self, model: onnx.ModelProto, read: ReadWeight, state: Sequence[StateTensor], capacity: int
    ) -> None:
        """Cuts the graph; `capacity` is the number of rows of its caches, which are zeroed."""
        self._runner, self._outputs = PiecewiseRunner(model, read, state), {t.output: t.input for t in state}
        self.state: dict[str, Array] = {}
        for tensor in state:
            shape = [capacity if d == "T" else 1 if d == "B" else int(d) for d in tensor.shape]
            self.state[tensor.input] = np.zeros(shape, np.float32)

    def run(self, **inputs: Array) -> dict[str, Array]:
        """One call; the caches move on."""
        (outputs,) = self._runner.run([inputs], self.state)
        self.state |= {name: outputs[output] for output, name in self._outputs.items()}
        return outputs


def _value(array: Array) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def _widened(tensor: onnx.TensorProto, graph: onnx.GraphProto) -> onnx.TensorProto:
    """A half-precision weight that is only ever converted is asked for in fp32, which holds the same values."""
    readers = [node.op_type for node in graph.node if tensor.name in node.input]
    if tensor.data_type not in _HALVES or set(readers) != {"Cast"}:
        return tensor
    wide = onnx.TensorProto()
    wide.CopyFrom(tensor)
    wide.data_type = onnx.TensorProto.FLOAT
    return wide
