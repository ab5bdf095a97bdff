"""The flatbuffer of a .tflite file: tensors, operators and metadata."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from softstair._errors import import_extra

Array = npt.NDArray[Any]
SCHEMA = "ai_edge_litert.schema_py_generated"
KEY = "softstair"


def schema() -> Any:
    """Return the module of the schema, which LiteRT carries."""
    return import_extra(SCHEMA, "tflite")


class TfliteGraph:
    """A file with one graph."""

    def __init__(self) -> None:
        self.schema = s = schema()
        self.model, self.graph = s.ModelT(), s.SubGraphT()
        self.model.version, self.model.description = 3, "softstair"
        self.model.buffers, self.model.operatorCodes = [s.BufferT()], []
        self.model.subgraphs, self.model.metadata = [self.graph], []
        self.graph.tensors, self.graph.operators = [], []
        self.graph.inputs, self.graph.outputs = [], []
        self._codes: dict[tuple[int, int], int] = {}

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        kind: str,
        scale: Any = None,
        zero: int = 0,
        data: Array | None = None,
        axis: int = 0,
    ) -> int:
        """Add a tensor, of a constant if it has data, and return its number."""
        t = self.schema.TensorT()
        t.name, t.shape, t.hasRank, t.buffer = name, [*map(int, shape)], True, 0
        t.type = getattr(self.schema.TensorType, kind)
        if data is not None:
            t.buffer = self._buffer(np.ascontiguousarray(data).tobytes())
        if scale is not None:
            t.quantization = q = self.schema.QuantizationParametersT()
            q.scale = np.atleast_1d(np.asarray(scale, np.float32))
            q.zeroPoint = np.full(len(q.scale), zero, np.int64)
            q.quantizedDimension = axis
        self.graph.tensors.append(t)
        return len(self.graph.tensors) - 1

    def constant(self, name: str, data: Array, scale: Any = None, axis: int = 0) -> int:
        """Add a constant, and return its number."""
        return self.tensor(name, data.shape, data.dtype.name.upper(), scale, 0, data, axis)

    def operator(
        self, name: str, inputs: Sequence[int], output: int, version: int = 1, **options: Any
    ) -> int:
        """Add an operator with the options of its own type, and return its output."""
        s = self.schema
        code = getattr(s.BuiltinOperator, name)
        if (code, version) not in self._codes:
            row = s.OperatorCodeT()
            row.builtinCode, row.deprecatedBuiltinCode = code, min(code, 127)
            row.version = version
            self.model.operatorCodes.append(row)
            self._codes[code, version] = len(self.model.operatorCodes) - 1
        operator = s.OperatorT()
        operator.opcodeIndex = self._codes[code, version]
        operator.inputs, operator.outputs = [*inputs], [output]
        kind = OPTIONS.get(name, f"{name.title().replace('_', '')}Options")
        if hasattr(s, f"{kind}T"):
            operator.builtinOptions = getattr(s, f"{kind}T")()
            operator.builtinOptionsType = getattr(s.BuiltinOptions, kind)
            for key, value in options.items():
                assert hasattr(operator.builtinOptions, key), key
                setattr(operator.builtinOptions, key, value)
        self.graph.operators.append(operator)
        return output

    def content(self, about: dict[str, Any]) -> bytes:
        """Return the file, with facts about it in its metadata."""
        row = self.schema.MetadataT()
        row.name, row.buffer = KEY, self._buffer(json.dumps(about).encode())
        self.model.metadata = [row]
        builder = import_extra("flatbuffers", "tflite").Builder(1 << 20)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def _buffer(self, data: bytes) -> int:
        buffer = self.schema.BufferT()
        buffer.data = np.frombuffer(data, np.uint8)
        self.model.buffers.append(buffer)
        return len(self.model.buffers) - 1


OPTIONS = {
    "CONV_2D": "Conv2DOptions",
    "DEPTHWISE_CONV_2D": "DepthwiseConv2DOptions",
    "MAX_POOL_2D": "Pool2DOptions",
    "PADV2": "PadV2Options",
    "SUM": "ReducerOptions",
}


def facts_of(content: bytes) -> dict[str, Any]:
    """Return the facts in the metadata of a file of ours; empty for other files."""
    model = schema().Model.GetRootAs(content, 0)
    for number in range(model.MetadataLength()):
        row = model.Metadata(number)
        if row.Name() == KEY.encode():
            facts: dict[str, Any] = json.loads(model.Buffers(row.Buffer()).DataAsNumpy().tobytes())
            return facts
    return {}
