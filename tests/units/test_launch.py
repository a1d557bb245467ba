"""What `utils.run.launch`, `ddp` and `fsdp` decide about a launch."""

import contextlib
import os
import socket
import sys
import warnings
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from harness.launches import ROOT

from utils.run import ddp, fsdp, launch, memory
from utils.run.failures import UserError


@pytest.fixture(autouse=True)
def options(monkeypatch):
    """The launcher's options, by name; an environment that describes one process alone."""
    given = {}
    monkeypatch.setattr(launch.launcher, "option", given.get)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE PET_NNODES MASTER_ADDR"
    names += " ACCELERATE_MIXED_PRECISION ACCELERATE_USE_CPU ACCELERATE_USE_FSDP FSDP_VERSION"
    names += " GLOO_SOCKET_IFNAME FSDP_OFFLOAD_PARAMS ACCELERATE_USE_PARALLELISM_CONFIG"
    for name in (*names.split(), "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that it is restored if the code sets it
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["scripts/train_a.py", "--lr", "1"])
    return given


def accelerator(processes=1, device="cpu", **more):
    more = {"is_main_process": True, "is_fsdp2": False, "mixed_precision": "bf16"} | more
    return SimpleNamespace(num_processes=processes, device=torch.device(device), **more)


# ------------------------------------------------------------------------------------------ check


@pytest.fixture
def decided(monkeypatch):
    """What `check` decides: which devices are set up, and how."""
    calls = []
    monkeypatch.setattr(launch, "set_gloo_interface", lambda: calls.append("gloo"))
    monkeypatch.setattr(
        launch,
        "_set_up_gpus",
        lambda gpus, deterministic: calls.append(("gpus", gpus, deterministic)),
    )
    monkeypatch.setattr(
        launch, "_set_up_cpu", lambda wanted, training: calls.append(("cpu", wanted, training))
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return calls


def test_where_there_are_gpus_they_are_used(decided, options, monkeypatch):
    assert launch.check() is False and decided == ["gloo", ("gpus", 2, True)]
    launch.check(SimpleNamespace(nondeterministic=True))
    assert decided.pop() == ("gpus", 2, False) and decided.pop() == "gloo"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert launch.check(SimpleNamespace()) is True and decided[3] == ("cpu", False, True)


@pytest.mark.parametrize("how", ["environment", "configuration"])
def test_a_launch_that_asks_for_the_cpu_gets_it(how, decided, options, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    else:
        options["--config_file"] = str(ROOT / "accelerate_configs" / "2cpu.yaml")
    assert launch.check() is True and decided[1] == ("cpu", True, False)


def test_a_configuration_that_cannot_be_read_says_nothing(options, tmp_path):
    assert launch._launch_config() == {} and launch._config_name() == "this launch"
    options["--config_file"] = str(tmp_path / "none.yaml")
    assert launch._launch_config() == {} and launch._config_name() == "none.yaml"
    (tmp_path / "none.yaml").write_text("num_processes: 3\n")
    assert launch._launch_config() == {"num_processes": 3}


def test_sharding_is_checked_where_it_is_asked_for(decided, options, monkeypatch):
    calls = []
    monkeypatch.setattr(fsdp, "check", lambda *how, **more: calls.append((*how, more)))
    launch.check(shards=True)
    assert calls == []
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "TRUE")
    options["--config_file"] = "configs/fsdp.yaml"
    launch.check(shards=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    launch.check()
    assert calls == [
        ("fsdp.yaml", True, {"on_cpu": False}),
        ("fsdp.yaml", False, {"on_cpu": True}),
    ]


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_that_is_not_installed_is_not_searched_again(installed, decided, monkeypatch):
    spec = {"lomo_optim": object() if installed else None}
    monkeypatch.setattr(launch.importlib.util, "find_spec", spec.__getitem__)
    monkeypatch.setitem(sys.modules, "lomo_optim", "")
    del sys.modules["lomo_optim"]
    launch.check()
    assert ("lomo_optim" in sys.modules) == (not installed)
    assert installed or sys.modules["lomo_optim"] is None


def test_what_every_accelerator_is_given(monkeypatch):
    monkeypatch.setattr(launch.tracking, "trackers", {"none": [], "wandb": ["wandb"]}.__getitem__)
    args = SimpleNamespace(seed=7, timeout=30, output_dir="runs/a")
    options = launch.accelerator_options(args)
    loaders = options.pop("dataloader_config")
    assert loaders.split_batches and loaders.use_seedable_sampler and loaders.non_blocking
    assert loaders.data_seed == 7
    accumulation = options.pop("gradient_accumulation_plugin")
    assert accumulation.num_steps == 1 and accumulation.sync_with_dataloader is False
    (handler,) = options.pop("kwargs_handlers")
    assert handler.timeout == timedelta(seconds=30)
    assert options == {"log_with": None, "project_dir": "runs/a/tensorboard"}
    args.gradient_accumulation_steps, args.track = 4, "wandb"
    options = launch.accelerator_options(args)
    assert options["gradient_accumulation_plugin"].num_steps == 4
    assert options["log_with"] == ["wandb"]


# ----------------------------------------------------------------------------------------- banner


def test_the_banner_of_one_process(capsys, monkeypatch):
    monkeypatch.setattr(memory, "_micro_batch_size", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert launch.print_banner(accelerator(), 32) == 32 and memory._micro_batch_size == 32
    assert capsys.readouterr().out == (
        "train_a: 1 process, each on CPU, 1 thread, precision bf16\n"
        "global batch 32 = 1 process x 32 samples x 1 accumulation step\n"
    )


def test_the_banner_of_several_processes(capsys, options, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    options["--nnodes"] = "1:3"
    monkeypatch.setattr(launch.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert launch.print_banner(accelerator(2), 48, 2) == 12
    assert capsys.readouterr().out == (
        "train_a: 2 processes over gloo, each on CPU, 4 threads, precision bf16\n"
        "global batch 48 = 2 processes x 12 samples x 2 accumulation steps\n"
        "elastic training: when machines leave or join, the run continues from its last "
        "checkpoint with 2, 4 or 6 processes\n"
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for deterministic in (True, False):
        monkeypatch.setattr(
            torch, "are_deterministic_algorithms_enabled", lambda on=deterministic: on
        )
        launch.print_banner(accelerator(2, "cuda"), 48, 2)
        said = capsys.readouterr().out
        assert "each on NVIDIA H100, precision" in said
        assert ("the fastest algorithms (--nondeterministic)" in said) is not deterministic
    options["--nnodes"] = "1:2"
    launch.print_banner(accelerator(2), 48, 2)
    assert capsys.readouterr().out.endswith("checkpoint with 2 or 4 processes\n")
    launch.print_banner(accelerator(2, is_main_process=False), 48, 2)
    assert capsys.readouterr().out == ""


def test_a_launch_that_was_not_connected_names_its_configuration(options, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    options["--config_file"] = "configs/4gpu.yaml"
    with pytest.raises(UserError) as error:
        launch.print_banner(accelerator(1), 32)
    assert str(error.value) == (
        "4 processes were launched but Accelerate connected only 1: check distributed_type in "
        "4gpu.yaml"
    )
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"^4gpu.yaml asks for a sharded model, but accelerate"):
        launch.print_banner(accelerator(4), 32)
    launch.fsdp.check_engaged(accelerator(4, is_fsdp2=True), "4gpu.yaml")


def test_the_processes_that_a_launch_can_have(options, monkeypatch):
    assert launch.possible_processes(accelerator(3)) == [3]
    monkeypatch.setenv("PET_NNODES", "1:4")
    assert launch.possible_processes(accelerator(3)) == [3, 6, 9, 12]
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert launch.possible_processes(accelerator(4)) == [2, 4, 6, 8]
    assert launch.possible_processes(accelerator(3)) == [3]  # machines of different sizes
    options["--nnodes"] = "2:3"
    assert launch.possible_processes(accelerator(4)) == [4, 6]
    options["--nnodes"] = "2"
    assert launch.possible_processes(accelerator(4)) == [4]
    assert launch.either([2]) == "2" and launch.either([2, 4]) == "2 or 4"


def test_a_batch_must_fit_every_number_of_processes(options):
    options["--nnodes"] = "1:3"
    share = launch.split_batch(accelerator(2), 24, 2)
    assert share == 6 and type(share) is int
    with pytest.raises(UserError, match=r"over 2, 4 or 6 process.*: use 24 or 48$"):
        launch.split_batch(accelerator(2), 32, 2)
    with pytest.raises(UserError, match=r"step\(s\): use 24$"):
        launch.split_batch(accelerator(2), 8, 2)


# ---------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("gpus", "processes", "fits"), [(4, 8, 4), (7, 8, 4), (8, 9, 8), (1, 2, 1), (12, 16, 8)]
)
def test_the_largest_configuration_that_fits(gpus, processes, fits, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    with pytest.raises(UserError) as error:
        launch._set_up_gpus(gpus)
    plural = "s" if gpus > 1 else ""
    assert str(error.value).endswith(f"has {gpus} GPU{plural}: use {fits}gpu.yaml")
    assert error.value.rank_variable == "LOCAL_RANK"


def test_gpus_compute_the_same_bits_after_a_restart(monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda *how, **more: calls.append((how, more))
    )
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    # CUDA is not used yet: train_model_parallel.py changes afterwards which GPUs it sees.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    launch._set_up_gpus(1)
    assert calls == [((True,), {"warn_only": True})]
    assert torch.backends.cudnn.deterministic is True
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    launch._set_up_gpus(1)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # a person's choice


def test_the_fastest_algorithms_if_they_are_asked_for(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr(torch, "use_deterministic_algorithms", refuse)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)  # as PyTorch starts
    launch._set_up_gpus(1, deterministic=False)
    assert torch.backends.cudnn.benchmark is True
    assert torch.backends.cudnn.deterministic is False
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize(
    ("precision", "capabilities", "sharded", "says"),
    [
        ("bf16", [(7, 5)], False, "set mixed_precision: fp16"),
        ("bf16", [(8, 0), (7, 0)], False, "set mixed_precision: fp16"),
        ("bf16", [(7, 5)], True, 'set mixed_precision: "no"'),
        ("bf16", [(8, 0)], False, None),
        ("bf16", [(12, 0), (7, 5)], False, None),  # the second is not used
        ("fp16", [(7, 5)], False, None),
        ("no", [(7, 5)], False, None),
    ],
)
def test_bf16_needs_gpus_that_compute_in_it(precision, capabilities, sharded, says, monkeypatch):
    """PyTorch also calls a GPU that emulates it able to compute in it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(sharded).lower())
    used = 2 if says and len(capabilities) > 1 else 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(used))
    monkeypatch.setenv("WORLD_SIZE", "1")
    one = accelerator(1, "cuda", mixed_precision=precision, is_main_process=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *how, **more: None)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.amp.GradScaler, "step", torch.amp.GradScaler.step)
    monkeypatch.setattr(launch.fsdp, "check_engaged", lambda *_: None)
    before = torch.amp.GradScaler.step
    launch._set_up_gpus(len(capabilities))
    assert (torch.amp.GradScaler.step is not before) == (precision == "fp16")
    if says is None:
        assert launch.print_banner(one, 8) == 8
        return
    with pytest.raises(UserError, match=f"GPU {used - 1} only emulates.*{says}$") as error:
        launch.print_banner(one, 8)
    assert error.value.rank_variable == "LOCAL_RANK"


@pytest.fixture
def cpu(monkeypatch):
    """What `_set_up_cpu` asks of the CPU, which has native bf16 if `bf16` is true."""
    state = SimpleNamespace(bf16=True, calls=[], notices=[])
    monkeypatch.setattr(launch.cpu, "has_bf16", lambda: state.bf16)
    monkeypatch.setattr(launch.cpu, "threads_per_process", lambda: 3)
    monkeypatch.setattr(launch.cpu, "keep_freed_memory", lambda: state.calls.append("memory"))
    monkeypatch.setattr(torch, "set_num_threads", state.calls.append)
    monkeypatch.setattr(launch, "notice", state.notices.append)
    return state


@pytest.mark.parametrize(
    ("asked", "native", "gets"),
    [
        ("bf16", True, "bf16"),
        ("bf16", False, "no"),
        ("fp16", True, "no"),
        ("fp16", False, "no"),
        ("no", True, "no"),
        ("no", False, "no"),
    ],
)
def test_a_gpu_configuration_without_a_gpu(asked, native, gets, cpu, options, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    options["--config_file"] = "configs/4gpu.yaml"
    cpu.bf16 = native
    launch._set_up_cpu(False, True)
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == gets and cpu.calls == [3, "memory"]
    (said,) = cpu.notices
    assert said.startswith(
        f"NO GPU FOUND: 4gpu.yaml runs on the CPU with 1 process, precision {gets}. This is fine"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    launch._set_up_cpu(False, True)
    assert " 2 processes over gloo, the model sharded over them, precision" in cpu.notices[1]
    monkeypatch.setenv("RANK", "1")
    launch._set_up_cpu(False, True)
    assert len(cpu.notices) == 2


@pytest.mark.parametrize(
    ("asked", "native", "training", "says"),
    [
        ("bf16", False, False, "this CPU has no native bf16 and emulates it"),
        ("bf16", True, True, None),
        ("no", True, True, "this CPU has native bf16, 1.5x to 4x faster"),
        (None, True, True, "this CPU has native bf16, 1.5x to 4x faster"),
        ("no", True, False, None),
        ("no", False, True, None),
    ],
)
def test_which_precision_is_faster_on_this_cpu(asked, native, training, says, cpu, monkeypatch):
    if asked:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    cpu.bf16 = native
    launch._set_up_cpu(asked is not None, training)
    assert len(cpu.notices) == (says is not None)
    assert not says or cpu.notices[0].startswith(says)
    cpu.notices.clear()
    monkeypatch.setenv("RANK", "1")
    launch._set_up_cpu(asked is not None, training)
    assert not cpu.notices


# ---------------------------------------------------------------------------------------- network


def test_an_interface_is_looked_for_only_between_machines(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    monkeypatch.setattr(socket, "gethostbyname", {"me": "127.0.1.1"}.__getitem__)
    monkeypatch.setattr(launch, "interface_to", lambda host: asked.append(host))
    launch.set_gloo_interface()
    assert not asked and not capsys.readouterr().err
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    launch.set_gloo_interface()
    assert asked == ["10.0.0.1"] and "GLOO_SOCKET_IFNAME" not in os.environ
    assert capsys.readouterr().err.startswith("*** the host name of this machine is that of a loop")


NETWORK = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5", "down0": "10.2.0.5"}


@pytest.mark.parametrize(
    ("names", "own", "found"),
    [
        (NETWORK, "10.1.0.5", "ib0"),
        (NETWORK, "10.2.0.5", None),
        (NETWORK, None, None),
        (["lo", "eth0", "down0"], None, "eth0"),
        (["lo", "eth0"], "127.0.0.1", "eth0"),
        (["lo"], "127.0.0.1", None),
    ],
)
def test_the_interface_to_a_host(names, own, found, monkeypatch):
    reached = []

    class Probe:
        def __init__(self, *kind):
            assert kind == (socket.AF_INET, socket.SOCK_DGRAM)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def connect(self, address):
            assert address == ("head", 9)
            reached.append(address)
            if own is None:
                raise OSError("Network is unreachable")

        def getsockname(self):
            return own, 40_000

    def entries(name):
        v6 = SimpleNamespace(family=socket.AF_INET6, address=f"fe80::{name}")
        return [v6, SimpleNamespace(family=socket.AF_INET, address=NETWORK[name])]

    monkeypatch.setattr(launch.socket, "socket", Probe)
    monkeypatch.setattr(
        launch.psutil, "net_if_addrs", lambda: {name: entries(name) for name in names}
    )
    up = {name: SimpleNamespace(isup=name != "down0") for name in names}
    monkeypatch.setattr(launch.psutil, "net_if_stats", lambda: up)
    assert launch.interface_to("head") == found and len(reached) == 1


# ------------------------------------------------------------------------------------ ddp and fsdp


def test_who_says_what_about_batch_norm(capsys):
    def said(samples, wanted, device="cpu", **more):
        layer = torch.nn.BatchNorm1d(2)
        ddp.sync_batch_norm(accelerator(device=device, **more), layer, samples, wanted)
        return capsys.readouterr().err

    assert "the 31 samples" in said(31, False) and "the 31 samples" in said(31, True)
    assert said(32, False) == said(32, True) == said(33, False) == ""
    assert said(250, False, processes=2) == ""
    assert "--sync_batchnorm needs GPUs: here batch norm uses the 250" in said(
        250, True, processes=2
    )
    for wanted in (True, False):
        assert said(8, wanted, processes=2, is_main_process=False) == ""
    assert "the 31 samples" in said(31, True, "cuda")


def test_a_warm_up_compiles_nothing(monkeypatch):
    stances = []

    def set_stance(stance):
        stances.append(stance)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.compiler, "set_stance", set_stance)
    model = torch.nn.Linear(2, 1)
    ddp.warm_up(model, lambda: model(torch.ones(1, 2)).sum())
    assert stances == ["force_eager"] * 2


def test_a_script_that_does_not_shard_is_named():
    with pytest.raises(UserError, match=r"^a.yaml shards the model, which train_a.py does not"):
        fsdp.check("a.yaml", False, on_cpu=False)


def test_a_warning_that_nobody_can_answer_is_not_shown(monkeypatch):
    for name, value in {
        "FSDP_VERSION": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "TRUE",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        fsdp.check("a.yaml", True, on_cpu=False)
        warnings.warn("Slicing a flattened dim from root mesh will be deprecated", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another"]
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UserError, match="which does not fit 1 processes"):
        fsdp.check("a.yaml", True, on_cpu=False)


@pytest.mark.parametrize("precision", ["bf16", "no"])
@pytest.mark.parametrize(
    ("kind", "plugin", "shards"),
    [
        (DistributedType.MULTI_CPU, True, True),
        (DistributedType.MULTI_CPU, False, False),
        (DistributedType.MULTI_GPU, True, False),
        (DistributedType.NO, True, False),
    ],
)
def test_accelerate_is_made_to_shard_on_a_cpu(kind, plugin, shards, precision, monkeypatch):
    calls, precisions = [], []
    plugin = SimpleNamespace(set_mixed_precision=precisions.append) if plugin else None
    state = SimpleNamespace(fsdp_plugin=None, _mixed_precision=precision)

    def decide(self, *args, fsdp_plugin=None, **kwargs):
        """The original."""
        calls.append((self, args, fsdp_plugin, kwargs))
        self.distributed_type = kind

    monkeypatch.setattr(AcceleratorState, "__init__", decide)
    monkeypatch.setattr(PartialState, "_shared_state", {"distributed_type": kind})
    monkeypatch.setenv("FSDP_VERSION", "2")
    fsdp.check("a.yaml", True, on_cpu=True)
    changed = AcceleratorState.__init__
    assert changed is not decide and changed.__doc__ == "The original."
    assert changed(state, "bf16", fsdp_plugin=plugin, cpu=True) is None
    assert calls == [(state, ("bf16",), plugin, {"cpu": True})]
    expected = DistributedType.FSDP if shards else kind
    assert state.distributed_type == PartialState._shared_state["distributed_type"] == expected
    assert state.fsdp_plugin is (plugin if shards else None)
    assert precisions == (["bf16"] if shards and precision == "bf16" else [])


def test_the_blocks_to_gather_are_those_that_the_model_names():
    class Block(torch.nn.Linear):
        pass

    class Net(torch.nn.Sequential):
        _no_split_modules = ("Block", "Absent")

    def chosen(model, listed=None, sharded=True, policy=fsdp.transformer_auto_wrap_policy):
        plugin = SimpleNamespace(transformer_cls_names_to_wrap=listed, auto_wrap_policy=policy)
        state = SimpleNamespace(fsdp_plugin=plugin)
        fsdp.use_model_blocks(SimpleNamespace(is_fsdp2=sharded, state=state), model)
        return plugin.transformer_cls_names_to_wrap

    net = Net(Block(1, 1), torch.nn.ReLU())
    assert chosen(net) == ["Block"] and chosen(net, sharded=False) is None
    assert chosen(net, ["ReLU"]) == ["ReLU"]
    assert chosen(net, policy=partial(fsdp.transformer_auto_wrap_policy, 1)) == ["Block"]
    with pytest.raises(UserError, match="set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"):
        chosen(net, policy=None)
    with pytest.raises(UserError, match="Net has no Other: leave the field out"):
        chosen(net, ["Block", "Other"])
    for model in (torch.nn.Sequential(Block(1, 1)), Net(torch.nn.ReLU())):
        with pytest.raises(UserError, match="gathered all at once"):
            chosen(model)


def test_tied_weights_are_sharded_only_where_they_stay_tied(monkeypatch):
    class Net(torch.nn.Linear):
        _no_split_modules = ("Net",)
        config = SimpleNamespace(tie_word_embeddings=True)

    policy = fsdp.transformer_auto_wrap_policy
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=None, auto_wrap_policy=policy)
    state = SimpleNamespace(fsdp_plugin=plugin)
    sharded = SimpleNamespace(is_fsdp2=True, state=state)
    monkeypatch.setattr(fsdp, "is_torch_version", lambda *_: False)
    fsdp.use_model_blocks(sharded, Net(1, 1))
    monkeypatch.setattr(fsdp, "is_torch_version", lambda *how: how == ("<", "2.13"))
    with pytest.raises(UserError, match=r"install torch 2\.13"):
        fsdp.use_model_blocks(sharded, Net(1, 1))


@pytest.mark.parametrize(("precision", "changed"), [("bf16", True), ("no", False)])
def test_gradients_of_a_sharded_model_are_reduced_in_float32(precision, changed):
    plugin = SimpleNamespace(mixed_precision_policy="default")
    state = SimpleNamespace(fsdp_plugin=plugin)
    fsdp.reduce_in_float32(SimpleNamespace(is_fsdp2=True, mixed_precision=precision, state=state))
    policy = plugin.mixed_precision_policy
    assert (policy != "default") == changed
    if changed:
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
        assert policy.cast_forward_inputs is False
    fsdp.reduce_in_float32(SimpleNamespace(is_fsdp2=False, mixed_precision="bf16"))


def test_a_sharded_model_is_gathered_for_a_while(monkeypatch):
    calls = []

    class Sharded:
        def unshard(self):
            calls.append("unshard")

        def reshard(self):
            calls.append("reshard")

    monkeypatch.setattr(fsdp, "FSDPModule", Sharded)
    with contextlib.suppress(ValueError), fsdp.gathered(Sharded()):
        assert calls == ["unshard"]
        raise ValueError
    assert calls == ["unshard", "reshard"]
    with fsdp.gathered(torch.nn.Linear(1, 1)):  # has neither method
        pass
