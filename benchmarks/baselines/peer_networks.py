"""A float network quantised by softstair, Brevitas and torchao, for ``benchmarks/peers.py``."""

import copy
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

import softstair as ss
from benchmarks.baselines.harness import Run
from benchmarks.speed.workload import brevitas_network
from softstair.convert.options import parse, stair_named
from softstair.models import last_layer
from softstair.train.metrics import CHUNK

TOLERANCE = 1e-4
"""Relative difference of scores that the order of a float sum explains."""
Net = Callable[[Tensor], Tensor]


@dataclass
class Candidate:
    """What a method makes of a float network."""

    network: nn.Module  # to be trained
    untrained: Net  # after quantisation without training
    trained: Callable[[], Net]  # returns the trained network in evaluation mode
    deploy: Callable[[Run], tuple[str, int, int]]  # export, numbers that differ, numbers compared


def with_softstair(model: nn.Module, bits: str, batches: Sequence[Tensor]) -> Candidate:
    """Quantise with the defaults of softstair."""
    net = ss.quantise(model, bits, skip=last_layer(model), quanta="learned")
    ss.calibrate(net, batches)

    def deploy(run: Run) -> tuple[str, int, int]:
        examples, trained = run.test, copy.deepcopy(net).cpu().eval()
        shape, zero = examples.x.shape[1:], int(examples.mean)
        images = examples.x.cpu()
        frozen = ss.freeze(trained, shape, zero=zero, scale=examples.std, examples=images)
        layers = frozen.report.layers
        return "integers", frozen.report.differing, sum(layer.compared for layer in layers)

    return Candidate(net, copy.deepcopy(net).eval(), net.eval, deploy)


def with_brevitas(model: nn.Module, bits: str, batches: Sequence[Tensor]) -> Candidate:
    """Use the default quantisers of Brevitas' layers, and its calibration."""
    calibrate = importlib.import_module("brevitas.graph.calibrate")
    weights, features = stairs(bits)
    net = brevitas_network(copy.deepcopy(model), weights, features)
    net.load_state_dict(model.state_dict(), strict=False)
    net.to(batches[0].device).eval()
    with torch.no_grad(), calibrate.calibration_mode(net):
        for x in batches:
            net(x)

    def deploy(run: Run) -> tuple[str, int, int]:
        # Brevitas imports it, but this export does not use it.
        sys.modules.setdefault("onnxoptimizer", ModuleType("onnxoptimizer"))
        export = importlib.import_module("brevitas.export").export_onnx_qcdq
        runtime, trained = importlib.import_module("onnxruntime"), copy.deepcopy(net).cpu().eval()
        runtime.set_default_logger_severity(3)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "net.onnx")
            export(copy.deepcopy(trained), args=batches[0][:1].cpu(), export_path=path)
            session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name

        def exported(x: Tensor) -> Tensor:
            rows = [session.run(None, {name: row[None].numpy()})[0] for row in x.cpu()]
            return torch.cat([torch.from_numpy(row) for row in rows])

        return "ONNX with float sums", *differences(net, exported, run)

    return Candidate(net, copy.deepcopy(net), net.eval, deploy)


def with_torchao(model: nn.Module, bits: str, batches: Sequence[Tensor]) -> Candidate:
    """Use torchao's quantisation of exported graphs, in the configuration of its tutorials.

    Its ``QATConfig`` is for Linear and Embedding. All but the average and the last layer is
    exported and quantised, with the limits of the levels as arguments; the input has 8 bits.
    """
    pt2e = importlib.import_module("torchao.quantization.pt2e")
    graphs = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    xnnpack = importlib.import_module("torchao.testing.pt2e._xnnpack_quantizer")
    weights, features = (len(stair) for stair in stairs(bits))
    high = (weights - 1) // 2
    low = -(features // 2)
    levels = {"act_qmin": low, "act_qmax": low + features - 1}
    levels |= {"weight_qmin": -high, "weight_qmax": high}
    pool, last = model.features[-1], model.classifier

    def prepared(is_qat: bool) -> nn.Module:
        settings = {"is_per_channel": True, "is_qat": is_qat}
        narrow = xnnpack.get_symmetric_quantization_config(**settings, **levels)
        byte = xnnpack.get_symmetric_quantization_config(**settings).input_activation
        first = replace(narrow, input_activation=byte, output_activation=None)
        prepare = graphs.prepare_qat_pt2e if is_qat else graphs.prepare_pt2e
        sizes, x, parts = ({0: torch.export.Dim("n", min=2)},), batches[0], []
        for part, config in ((model.features[:1], first), (model.features[1:-1], narrow)):
            copied = copy.deepcopy(part).train(is_qat)
            graph = torch.export.export(copied, (x,), dynamic_shapes=sizes).module()
            graph = prepare(graph, xnnpack.XNNPACKQuantizer().set_global(config))
            parts.append(pt2e.allow_exported_model_train_eval(graph))
            x = part(x).detach()
        return nn.Sequential(*parts, *copy.deepcopy((pool, last)))

    def converted(net: nn.Module) -> nn.Module:
        parts = [copy.deepcopy(part) for part in net.children()]
        for number in (0, 1):
            part = graphs.convert_pt2e(parts[number])
            parts[number] = pt2e.allow_exported_model_train_eval(part)
        return nn.Sequential(*parts).eval()

    observed, net = prepared(is_qat=False), prepared(is_qat=True)
    with torch.no_grad():
        for x in batches:
            observed(x)

    trained = lambda: net.eval().apply(pt2e.disable_observer)
    deploy = lambda run: ("graph with float sums", *differences(net, converted(net), run))
    return Candidate(net, converted(observed), trained, deploy)


METHODS = {"softstair": with_softstair, "brevitas": with_brevitas, "torchao": with_torchao}


def stairs(bits: str) -> tuple[ss.Stair, ...]:
    """Return the stairs of weights and features."""
    return tuple(stair_named(name) for name in parse(bits))


@torch.no_grad()
def scores(net: Net, run: Run) -> Tensor:
    """Return the scores of the examples that are held out."""
    return torch.cat([net(x).float().cpu() for x, _ in run.test.chunks(CHUNK)])


def accuracy(net: Net, run: Run) -> float:
    """Return the accuracy on the examples that are held out, in per cent."""
    correct = scores(net, run).argmax(1) == run.test.y.cpu()
    return 100 * correct.double().mean().item()


def differences(net: Net, exported: Net, run: Run) -> tuple[int, int]:
    """Return how many scores differ by more than rounding, and how many there are."""
    expected, actual = scores(net, run), scores(exported, run)
    differ = (expected - actual).abs() > TOLERANCE * expected.abs().max()
    return int(differ.sum()), differ.numel()
