"""Names that papers and other libraries have for what is here.

All are written in small letters and digits only.  A name in ALIASES means exactly one class, with its defaults.  A name
in NOT_ONE means several, or one with certain settings, or nothing that is here: the text says which.
"""

from __future__ import annotations

ALIASES: dict[str, dict[str, str]] = {
    "strategy": {
        "allreduce": "allreducesgd",
        "bsp": "allreducesgd",
        "bulksynchronousparallel": "allreducesgd",
        "dataparallelsgd": "allreducesgd",
        "ddp": "allreducesgd",
        "fullsgd": "allreducesgd",
        "ssgd": "allreducesgd",
        "sync": "allreducesgd",
        "synchronous": "allreducesgd",
        "syncsgd": "allreducesgd",
        "synchronoussgd": "allreducesgd",
        "cpsgd": "periodicaveraging",
        "fedavg": "periodicaveraging",
        "federatedaveraging": "periodicaveraging",
        "localsgd": "periodicaveraging",
        "modelaveraging": "periodicaveraging",
        "modelaveragingsgd": "periodicaveraging",
        "parameteraveraging": "periodicaveraging",
        "adaptiveperiodicaveraging": "adaptiveaveraging",
        "blockmomentumsgd": "blockmomentum",
        "blockwisemodelupdatefiltering": "blockmomentum",
        "bmuf": "blockmomentum",
        "dataparallelasgd": "asgd",
        "asyncmsgd": "asyncmomentum",
        "dcasgd": "delaycompensated",
        "downpoursgd": "downpour",
        "paramserver": "parameterserver",
        "ps": "parameterserver",
        "ssp": "stalesynchronous",
        "stalesynchronousparallel": "stalesynchronous",
        "asynceamsgd": "eamsgd",
        "elasticaveragingsgd": "easgd",
        "hogwildsgd": "hogwild",
        "lbfgs": "sandblaster",
        "sandblasterlbfgs": "sandblaster",
    },
    "codec": {
        "1bit": "onebit",
        "1bitsgd": "onebit",
        "onebitsgd": "onebit",
        "bf16": "bfloat16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float8": "fp8",
        "deepgradientcompression": "dgc",
        "ternary": "terngrad",
        "topksgd": "topk",
    },
    "rule": {"dcasgd": "compensated", "softsync": "every", "elastic": "attract"},
    "gate": {"asp": "free", "ssp": "bound", "stalesynchronous": "bound"},
}

_ADPSGD = (
    "ADPSGD of Jiang and Agrawal, with an adaptive period, is AdaptiveAveraging; "
    "AD-PSGD of Lian et al., in pairs, is Gossip"
)
_ASYNC = "on a server it is ParameterServer (pushes gradients) or ASGD (pushes changes of local steps)"
_BITS = "it is NBit(bits={0})"

NOT_ONE: dict[str, dict[str, str]] = {
    "strategy": {
        "adpsgd": _ADPSGD,
        **dict.fromkeys(("async", "asyncsgd", "asynchronous", "asynchronoussgd"), _ASYNC),
        "decentralizedsgd": "it is Gossip(overlap=False), or Gossip() if workers do not wait",
        "dpsgd": "it is Gossip(overlap=False), in pairs",
        "elasticaveraging": "it is one of EASGD, AsyncEASGD, RoundRobinEASGD, EAMSGD and EAWild",
        "postlocalsgd": "it is Then(AllReduceSGD(), PeriodicAveraging(period=...), steps=...)",
        "sgp": "stochastic gradient push is not here; the nearest is Gossip",
        "streamingdiloco": "it is DiLoCo(fragments=..., delay=...)",
        "warmstart": "it is Then(Replicated(), ..., epochs=1)",
    },
    "codec": {
        "int8": "it is NBit(bits=8), or QSGD() with random rounding",
        "none": "leave the codec out (codec=None) for plain values",
        "quantization": "it is one of OneBit, NBit, QSGD, TernGrad and Fp8",
        "randomk": "it is not here; the nearest is TopK",
        **dict.fromkeys(("sign", "signsgd", "efsignsgd"), "the nearest is OneBit, which sends its error later"),
        "strom": "its codec is Threshold(tau=...), and the method is the strategy Strom",
        **{f"{bits}bit": _BITS.format(bits) for bits in (2, 4, 8, 16)},
        **{f"{bits}bits": _BITS.format(bits) for bits in (2, 4, 8, 16)},
    },
    "rule": {"nesterov": "it is Momentum(nesterov=True)", "msgd": "it is Momentum()"},
    "gate": {"bsp": "it is Bound(bound=0)"},
}

USE: dict[str, str] = {
    "strategy": "give it as the strategy: {0}(...)",
    "codec": "give it to a strategy: AllReduceSGD(codec={0}(...))",
    "rule": "give it to a server: ParameterServer(rule={0}(...))",
    "gate": "give it to a server: ParameterServer(gate={0}(...))",
}
