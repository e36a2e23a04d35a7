"""hpc_elastic.config: what a user may write, and what the refusals say."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hpc_elastic.config.parse import parse_nodes, parse_nproc, parse_time
from hpc_elastic.config.resolve import RENAMED, read_env_file, resolve
from hpc_elastic.config.schema import LocalSettings, NodeRange, RunSettings, SlurmSettings
from hpc_elastic.errors import ConfigError


def slurm(nodes=None, **keys):
    """Return a composed config of launcher=slurm."""
    return {"nodes": nodes, "launcher": {"backend": "slurm", **keys}}


def local(nodes=None, **keys):
    """Return a composed config of launcher=local."""
    return {"nodes": nodes, "launcher": {"backend": "local", **keys}}


def of_sizes(world_sizes=(1, 2), **keys):
    """Return a composed config with the sizes that a group may have."""
    return {**local("1:2", world_sizes=list(world_sizes)), "nproc_per_node": 1, **keys}


def refusal(config, **kwargs):
    """Return the error that a config is refused with."""
    with pytest.raises(ConfigError) as caught:
        resolve(config, **kwargs)
    return caught.value


def test_every_unquoted_range_in_yaml_is_understood_or_refused_with_its_spelling():
    """No `nodes: a:b` of a YAML file ever becomes a count of nodes."""
    wrong = []
    for low, high in itertools.product(range(1, 100), repeat=2):
        value = OmegaConf.create(f"nodes: {low}:{high}").nodes
        try:
            is_right = parse_nodes(value, from_yaml=True) == NodeRange(low, high)
        except ConfigError as e:
            smaller, larger = sorted((low, high))
            is_right = f"nodes: '{smaller}:{larger}'" in str(e)
            is_right &= low > high or isinstance(value, int)
        if not is_right:
            wrong.append((low, high))
    assert wrong == []


def test_every_quoted_range_in_yaml_is_understood():
    """`nodes: 'a:b'` is that range, whatever the numbers are."""
    wrong = []
    for low, high in itertools.combinations_with_replacement(range(1, 100), 2):
        value = OmegaConf.create(f"nodes: '{low}:{high}'").nodes
        if parse_nodes(value, from_yaml=True) != NodeRange(low, high):
            wrong.append((low, high))
    assert wrong == []


def test_forms_of_nodes(subtests):
    """A count or a range, as a number or as a text."""
    for value, from_yaml, nodes in [
        *[(number, True, NodeRange(number, number)) for number in (1, 60, 120)],
        *[(str(number), True, NodeRange(number, number)) for number in (4, 76)],
        (76, False, NodeRange(76, 76)),
        ("1:16", True, NodeRange(1, 16)),
        ("01:16", True, NodeRange(1, 16)),
        (" 4:4 ", False, NodeRange(4, 4)),
    ]:
        with subtests.test(value=value, from_yaml=from_yaml):
            assert parse_nodes(value, from_yaml=from_yaml) == nodes


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, "0", "0:4", "-1", "4:1", "", ":", "1:", ":4", "1:2:3", "1-4"),
        *(1.5, True, None, [4], "x"),
    ],
)
@pytest.mark.parametrize("from_yaml", [True, False])
def test_what_nodes_may_not_be(value, from_yaml):
    """Anything else is refused, with the key and the value."""
    with pytest.raises(ConfigError) as caught:
        parse_nodes(value, from_yaml=from_yaml)
    assert (caught.value.key, caught.value.value) == ("nodes", value)
    assert "'" in str(caught.value)


def test_both_readings_of_an_ambiguous_number_are_spelled_out():
    """The message of 76 says how a range and how a count are written."""
    message = str(refusal(slurm(nodes=76)))
    assert "nodes: '1:16'" in message
    assert "nodes: '76'" in message


def test_an_unquoted_clock_time_in_yaml_is_refused_with_both_readings(subtests):
    """`time: 24:00:00` is 86400 for YAML, which may as well be minutes."""
    for written, spelling, minutes in [
        ("24:00:00", "'24:00:00'", "'86400'"),
        ("1:30", "'1:30'", "'90'"),
        ("1:00:05", "'1:00:05'", "'3605'"),
        ("1:00", "'1:00'", "'60'"),
        ("1440", "'24:00'", "'1440'"),
    ]:
        with subtests.test(written=written, spelling=spelling):
            launcher = OmegaConf.to_container(OmegaConf.create(f"time: {written}"))
            message = str(refusal(slurm(**launcher)))
            assert message.startswith("launcher.time=")
            assert f"time: {spelling}" in message
            assert f"time: {minutes}" in message


def test_forms_of_time(subtests):
    """Every form of sbatch --time."""
    for value, time in [
        *[(30, "30"), ("unlimited", "UNLIMITED")],
        *[(t, t) for t in ("90", "01:30", "24:00:00", "1-12", "1-12:30", "0-00:00:30")],
    ]:
        with subtests.test(value=value, time=time):
            assert parse_time(value, from_yaml=True) == time


def test_a_number_on_the_command_line_is_minutes():
    """Hydra's command line never reads base 60."""
    settings = resolve(slurm(time=90), overrides=["launcher=slurm", "launcher.time=90"])
    assert settings.launcher.time == "90"


def test_what_time_may_not_be(subtests):
    """Anything else is refused, and the forms are listed."""
    for value in [0, -5, "0:00", "1:75", "1:2:3:4", "soon", 1.5, True, "", [1]]:
        with subtests.test(value=value), pytest.raises(ConfigError, match="HH:MM:SS"):
            parse_time(value, from_yaml=False)


def test_forms_of_nproc_per_node(subtests):
    """A count, or what is counted on the node."""
    for value, nproc in [(1, 1), ("8", 8), ("auto", "auto"), ("gpu", "gpu"), ("cpu", "cpu")]:
        with subtests.test(value=value, nproc=nproc):
            assert parse_nproc(value) == nproc


def test_what_nproc_per_node_may_not_be(subtests):
    """Anything else is refused, and the words are listed."""
    for value in [0, -1, "gpus", 1.5, True, None, ""]:
        with subtests.test(value=value), pytest.raises(ConfigError, match="auto, gpu or cpu"):
            parse_nproc(value)


def test_a_near_miss_of_nproc_per_node_is_named():
    """`gpus` is taken for a slip of `gpu`."""
    with pytest.raises(ConfigError, match="did you mean 'gpu'"):
        parse_nproc("gpus")


def test_what_is_not_given_takes_its_default(subtests):
    """One node, as many workers as it has devices, and the dataclasses' own defaults."""
    for nothing in [None, "???"]:
        with subtests.test(nothing=nothing):
            config = {
                "nodes": nothing,
                "nproc_per_node": nothing,
                "launcher": {
                    "backend": "slurm",
                    "partition": "???",
                    "rendezvous": {"heartbeat_interval_s": "???"},
                },
            }
            assert resolve(config) == RunSettings(NodeRange(1, 1), "auto", SlurmSettings())


def test_settings_resolve_from_their_own_config():
    """What is frozen for the workers means what was given, and needs no command line."""
    config = slurm(
        nodes=961,
        time=90,
        sbatch={"contiguous": True},
        env={"A": "b"},
        container={"runtime": "pyxis", "image": "x", "mounts": ["/a:/b"]},
        gpus_per_node="a100:2",
        rendezvous={"join_timeout_s": 3600},
    )
    settings = resolve(config, overrides=["nodes=961", "launcher.time=90"])
    assert resolve(settings.as_config()) == settings
    assert resolve(resolve(local()).as_config()) == resolve(local())


def test_a_count_on_the_command_line_is_taken_as_it_is(subtests):
    """76 typed by a person is 76 nodes."""
    for override in ["nodes=76", "+nodes=76", "++nodes=76"]:
        with subtests.test(override=override):
            assert resolve(slurm(nodes=76), overrides=[override]).nodes == NodeRange(76, 76)


def test_a_number_that_the_command_line_fetches_from_yaml_is_from_yaml(subtests):
    """An interpolation on the command line ends in a YAML file."""
    for overrides in [["nodes=${n}"], ["nodes=76", "nodes=${n}"], ["lr=76"], []]:
        with subtests.test(overrides=overrides):
            assert refusal(slurm(nodes=76), overrides=overrides).key == "nodes"


def test_a_sweep_written_in_yaml_is_from_yaml():
    """hydra.sweeper.params becomes overrides, after YAML has read it."""
    sweep = {"nodes": 76}
    assert refusal(slurm(nodes=76), overrides=["nodes=76"], sweep_params=sweep).key == "nodes"
    settings = resolve(slurm(nodes=4), overrides=["nodes=4"], sweep_params={"nodes": "4,8"})
    assert settings.nodes == NodeRange(4, 4)


def test_an_unknown_key_is_refused_with_what_may_have_been_meant(subtests):
    """A slip, another group's key, another launcher's, or the list of all."""
    for config, message in [
        (slurm(partion="x"), "launcher.partion='x': no such key (did you mean 'partition'?)"),
        (
            slurm(rendezvous={"join_timeout": 3}),
            "launcher.rendezvous.join_timeout=3: no such key (did you mean 'join_timeout_s'?)",
        ),
        (slurm(container={"img": 3}), "(did you mean 'image'?)"),
        (local(partition="x"), "launcher=local; it belongs to launcher=slurm"),
        (local(container={}), "it belongs to launcher=slurm"),
        (
            local(partion="x"),
            "no such key (did you mean 'launcher.partition'?); that belongs to launcher=slurm",
        ),
        (slurm(max_agents=2), "launcher=slurm; it belongs to launcher=local"),
        (slurm(heartbeat_interval_s=1), "(did you mean launcher.rendezvous.heartbeat_interval_s?)"),
        (slurm(rendezvous={"interface": "ib0"}), "(did you mean launcher.interface?)"),
        (local(coallocate_min=True), "launcher=local; it belongs to launcher=slurm"),
        (slurm(nproc_per_node=2), "top level: nproc_per_node=..."),
        (local(zzz=2), "launcher has max_restarts, scale_up"),
    ]:
        with subtests.test(config=config, message=message):
            assert message in str(refusal(config))


def test_workers_are_not_bound_without_the_preflight():
    """It finds where the GPUs are."""
    error = refusal(slurm(agent={"numa": "node", "preflight": False}))
    assert error.key == "launcher.agent.preflight" and "leave out numa" in str(error)
    assert "core-complex" in str(refusal(slurm(agent={"numa": "nodes"})))


def test_a_key_that_was_renamed_is_refused_with_its_present_name(subtests):
    """And the present name is a key of the same group."""
    for old in RENAMED:
        with subtests.test(old=old):
            new, values = RENAMED[old]
            *groups, name = old.split(".")[1:]
            value = next(iter(values), 1)
            config = slurm(**({groups[0]: {name: value}} if groups else {name: value}))
            error = refusal(config)
            mapped = f" ({value} -> {values[value]})" if values else ""
            assert error.key == old
            assert str(error) == f"{old}={value!r}: no such key; it is now called {new}{mapped}"
            found = functools.reduce(getattr, new.split(".")[1:], SlurmSettings())
            assert str(found) in values.values() or not values


def test_a_bad_value_is_refused_with_key_value_and_what_is_allowed(subtests):
    """Types come from the dataclasses, ranges and forms from a table."""
    for key, value, allowed in [
        ("wait", "yes", "true or false"),
        ("wait", None, "true or false"),
        ("queue_order", "depth", "did you mean 'depth_first'"),
        ("max_restarts", -1, "at least 0"),
        ("max_restarts", 1.5, "whole number"),
        ("max_restarts", True, "whole number"),
        ("max_requeues", -1, "at least 0"),
        ("signal_delay_s", 0, "above 0"),
        ("preempt_grace_s", -1, "above 0"),
        ("preempt_signal", "USR3", "USR1 or USR2"),
        ("max_failed_rounds", 0, "at least 1"),
        ("global_batch", 0, "at least 1"),
        ("poll_interval_s", 0, "above 0"),
        ("poll_interval_s", float("inf"), "a number"),
        ("poll_interval_s", "fast", "a number"),
        ("scale_up", "checkpiont", "did you mean 'checkpoint'"),
        ("scale_up", False, "checkpoint or immediate or on_restart"),
        ("scale_up_timeout_s", -1, "at least 0"),
        ("scale_up_timeout_s", None, "a number"),
        ("below_min_timeout_s", 0, "above 0"),
        ("min_efficiency", 1.5, "from 0 to 1"),
        ("min_efficiency", "half", "a number"),
        ("sweep_growth", "first", "equal or soonest"),
        ("below_min_timeout_s", "ever", "a number"),
        ("interface", 10, "quotes"),
        ("interface", "ib0,eth0 ", "without spaces"),
        ("coallocate_min", "yes", "true or false"),
        ("cpus_per_node", 0, "at least 1"),
        ("array_parallelism", 0, "at least 1"),
        ("gpus_per_node", 0, "'a100:2'"),
        ("gpus_per_node", "a100", "'a100:2'"),
        ("gpus_per_node", True, "'a100:2'"),
        ("gpus_per_node", 185_402, "'3090:2'"),  # as YAML reads it
        ("mem", 64, "64G"),
        ("mem", "64 G", "64G"),
        ("mem", "1.5G", "64G"),
        ("account", 83, "quotes"),
        ("partition", "a b", "without spaces"),
        ("partition", "", "not empty"),
        ("job_name", "a\n#SBATCH --wrap", "one line"),
        ("constraint", True, "quotes"),
        ("setup", "module load cuda", "list of texts"),
        ("setup", [1], "list of texts"),
        ("template", "/no/such/template.j2", "no such file"),
        ("env", ["A=1"], "mapping"),
        ("sbatch", "--hold", "mapping"),
        ("srun_args", "-v", "list of texts"),
        ("rendezvous", 3, "mapping"),
    ]:
        with subtests.test(key=key, value=value):
            error = refusal(slurm(**{key: value}))
            assert error.key == f"launcher.{key}"
            assert str(error).startswith(f"launcher.{key}={value!r}: ")
            assert allowed in str(error)


def test_what_spares_import_ahead_is_a_list_of_modules(subtests):
    """A distribution's name, or a text in place of a list, is refused."""
    for modules in ["torch", ["scikit-learn"], ["torch", ""], ["a b"]]:
        with subtests.test(modules=modules):
            assert (
                refusal(slurm(agent={"warm_imports": modules})).key == "launcher.agent.warm_imports"
            )


def test_warm_workers_are_made_in_one_of_three_ways(subtests):
    """YAML reads ``off`` as false; runs of before have true."""
    spelled = {"fork": "fork", "spawn": "spawn", "off": False, True: True, False: False}
    for value, read in spelled.items():
        with subtests.test(value=value):
            settings = resolve(slurm(agent={"warm_workers": value}))
            assert settings.launcher.agent.warm_workers == read
    for value in ("on", None, 1):
        with subtests.test(value=value):
            why = refusal(slurm(agent={"warm_workers": value}))
            assert why.key == "launcher.agent.warm_workers" and "fork or spawn or off" in str(why)


def test_good_values_are_read_as_their_type(subtests):
    """A number may stand in quotes; nothing stands for an empty list."""
    for key, value, read in [
        ("cpus_per_node", "4", 4),
        ("poll_interval_s", "0.5", 0.5),
        ("poll_interval_s", 2, 2.0),
        ("scale_up", "immediate", "immediate"),
        ("scale_up_timeout_s", 0, 0.0),
        ("below_min_timeout_s", None, None),
        ("min_efficiency", "0.5", 0.5),
        ("min_efficiency", None, None),
        ("below_min_timeout_s", "30", 30.0),
        ("interface", "ib0", "ib0"),
        ("coallocate_min", True, True),
        ("gpus_per_node", "2", 2),
        ("gpus_per_node", "a100:2", "a100:2"),
        ("gpus_per_node", "3090:2", "3090:2"),
        ("gpus_per_node", "2080ti:4,1g.10gb:1", "2080ti:4,1g.10gb:1"),
        ("mem", "64G", "64G"),
        ("mem", 0, "0"),
        ("setup", None, []),
        ("env", None, {}),
        ("env", {"A": 1, "B": "x y"}, {"A": "1", "B": "x y"}),
        ("partition", "a,b", "a,b"),
        ("partition", None, None),
        ("constraint", "[a|b]&c", "[a|b]&c"),
        ("template", __file__, __file__),
        ("srun_args", ["--cpu-bind=none", "-v"], ["--cpu-bind=none", "-v"]),
    ]:
        with subtests.test(key=key, value=value):
            assert getattr(resolve(slurm(**{key: value})).launcher, key) == read


def test_a_name_made_of_digits_is_accepted_from_the_command_line():
    """`launcher.account=12345` is a number for Hydra, yet nothing is lost."""
    settings = resolve(slurm(account=12345), overrides=["launcher.account=12345"])
    assert settings.launcher.account == "12345"


def test_environment_variables_that_can_not_work(subtests):
    """Names that no shell takes, names that the agent sets, values with no one spelling."""
    for name, value, why in [
        ("RANK", 1, "the agent sets this"),
        ("TORCHELASTIC_RUN_ID", "x", "the agent sets this"),
        ("A-B", 1, "not a variable name"),
        ("1A", 1, "not a variable name"),
        ("A", True, "quotes"),
        ("A", None, "quotes"),
    ]:
        with subtests.test(name=name, value=value):
            error = refusal(slurm(env={name: value}))
            assert error.key == f"launcher.env.{name}"
            assert why in str(error)


@pytest.fixture
def env_file(tmp_path):
    """Write a file with variables; return its path."""

    def write(text: str, mode: int = 0o600) -> Path:
        path = tmp_path / "secrets.env"
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


def test_variables_may_stand_in_a_file_that_only_its_owner_can_read(env_file):
    """As they are, whatever they contain."""
    path = env_file("# a comment\n\nTOKEN=a=b 'c' # d\n EMPTY =\n")
    settings = resolve({**slurm(env_file=str(path)), "nodes": 1})
    assert settings.launcher.env_file == str(path) and settings.launcher.env == {}
    assert read_env_file(str(path)) == {"TOKEN": "a=b 'c' # d", "EMPTY": ""}


def test_a_file_of_variables_that_cannot_work_is_refused(env_file, subtests):
    """The error names the line, and no value."""
    for text, mode, why in [
        ("TOKEN=secret", 0o640, "chmod 600"),
        ("TOKEN=secret", 0o602, "chmod 600"),
        ("A=1\nexport TOKEN=secret", 0o600, "line 2: not a variable name"),
        ("TOKEN secret", 0o600, "line 1: not NAME=value"),
        ("RANK=secret", 0o600, "line 1: the agent sets this variable"),
        ("TOKEN=secret\0", 0o600, "line 1: it has a null character"),
    ]:
        with subtests.test(text=text, mode=mode):
            error = refusal(slurm(env_file=str(env_file(text, mode))))
            assert error.key == "launcher.env_file" and why in str(error)
            assert "secret" not in str(error).replace("secrets.env", "")


def test_sbatch_flags_that_a_key_owns_or_that_would_break_a_run(subtests):
    """The refusal names the key to use instead."""
    for flag, value, why in [
        ("array", "0-3", "use the key nodes"),
        ("output", "x", "logs in the run directory"),
        ("open-mode", "append", "logs in the run directory"),
        ("open_mode", "append", "logs in the run directory"),
        ("requeue", True, "always requeued"),
        ("no-kill", False, "launcher.coallocate_min"),
        ("no-requeue", True, "always requeued"),
        ("nodes", 2, "use the key nodes"),
        ("ntasks", 2, "nproc_per_node"),
        ("ntasks_per_node", 2, "nproc_per_node"),
        ("--partition", "x", "use launcher.partition"),
        ("time", "1:00", "use launcher.time"),
        ("gpus-per-node", 2, "use launcher.gpus_per_node"),
        ("nodelist", "n1", "launcher.exclude"),
        ("clusters", "x", "login node"),
        ("p", "x", "long name"),
        ("two words", "x", "long name"),
        ("reservation", 1.5, "whole number"),
        ("reservation", "a\nb", "one line"),
        ("time-min", "10", "use launcher.time_min"),
        ("begin", 5400, "'1:30:00'"),
    ]:
        with subtests.test(flag=flag, value=value):
            error = refusal(slurm(sbatch={flag: value}))
            assert error.key == f"launcher.sbatch.{flag}"
            assert why in str(error)


def test_other_sbatch_flags_pass_under_their_long_names():
    """Underscores and dashes in front are tolerated; options of the site (SPANK) keep theirs."""
    flags = {"reservation": "night", "mail_type": "END", "--contiguous": True, "nice": 10}
    flags |= {"use_container": True}
    assert resolve(slurm(sbatch=flags)).launcher.sbatch == {
        "reservation": "night",
        "mail-type": "END",
        "contiguous": True,
        "nice": 10,
        "use_container": True,
    }


def test_an_sbatch_flag_given_twice_is_refused():
    """Two spellings of one flag contradict each other."""
    assert "twice" in str(refusal(slurm(sbatch={"mail_type": "END", "mail-type": "FAIL"})))


def test_srun_arguments_that_contradict_how_a_task_is_started(subtests):
    """One agent on one node, with logs of its own."""
    for arg in ["-N2", "-n", "--nodes=2", "--ntasks", "--output=x", "-o", "-W9", "-K"]:
        with subtests.test(arg=arg):
            assert refusal(slurm(srun_args=[arg])).key == "launcher.srun_args"


def test_keys_that_contradict_each_other_are_refused(subtests):
    """Each is allowed alone, but not together."""
    for config, key in [
        (slurm(container={"image": "x"}), "launcher.container.image"),
        (slurm(container={"runtime": "pyxis"}), "launcher.container.runtime"),
        (slurm(container={"mounts": ["/a"]}), "launcher.container.mounts"),
        (slurm(container={"runtime": "docker", "image": "x"}), "launcher.container.runtime"),
        (slurm(mem="1G", sbatch={"mem-per-cpu": "1G"}), "launcher.sbatch.mem-per-cpu"),
        (slurm(gpus_per_node=1, sbatch={"gres": "gpu:2"}), "launcher.sbatch.gres"),
        (slurm(gpus_per_node=1, sbatch={"gres": "lustre:1,gpu"}), "launcher.sbatch.gres"),
        (slurm(exclusive=True, sbatch={"oversubscribe": True}), "launcher.sbatch.oversubscribe"),
        (slurm(nodes="2:4", array_parallelism=1), "launcher.array_parallelism"),
        (local(nodes="2:4", max_agents=1), "launcher.max_agents"),
        (
            local(rendezvous={"heartbeat_timeout_s": 0.5}),
            "launcher.rendezvous.heartbeat_interval_s",
        ),
        (local(agent={"stop_timeout_s": 60}), "launcher.agent.stop_timeout_s"),
        (of_sizes(nodes="1:4"), "launcher.world_sizes"),
        (of_sizes(nodes="3"), "launcher.world_sizes"),
        (of_sizes(nproc_per_node="gpu"), "launcher.world_sizes"),
        (of_sizes(ft=True), "launcher.world_sizes"),
    ]:
        with subtests.test(config=config, key=key):
            assert refusal(config).key == key


def test_listed_sizes_are_numbers_of_nodes_that_fit_the_range():
    """Workers become nodes; a range whose ends are no such size is refused with one that fits."""
    config = functools.partial(of_sizes, [16, 2, 4, 6, 8, 7], nproc_per_node=2)
    assert resolve(config(nodes="1:8")).node_counts == [1, 2, 3, 4, 8]
    assert resolve(config(nodes="2:4:2")).node_counts == [2, 4]
    assert "nodes=1:4," in str(refusal(config(nodes="1:6")))


def test_what_else_a_node_has_may_be_asked_for_beside_its_gpus():
    """Only GPUs that are named twice are a contradiction."""
    settings = resolve(slurm(gpus_per_node=1, sbatch={"gres": "lustre:1,gpumem:8G"}))
    assert settings.launcher.gpus_per_node == 1


def test_the_array_of_a_coallocated_job_may_be_narrower_than_the_min_part():
    """array_parallelism limits the array, and the min part is not in it."""
    settings = resolve(slurm(nodes="2:4", array_parallelism=1, coallocate_min=True))
    assert settings.launcher.array_parallelism == 1


def test_everything_that_is_wrong_is_said_at_once():
    """One line for each error; the attributes are the first one's."""
    error = refusal(
        slurm(nodes=76, partion="x", wait="yes", rendezvous={"heartbeat_interval_s": 0})
    )
    lines = str(error).splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "nodes",
        "launcher.partion",
        "launcher.wait",
        "launcher.rendezvous.heartbeat_interval_s",
    ]
    assert (error.key, error.value) == ("nodes", 76)


def test_without_a_launcher_the_error_says_how_to_choose_one(subtests):
    """A group called launcher may be the user's own."""
    for config in [{}, {"launcher": "slurm"}, {"launcher": {"mine": 1}}]:
        with subtests.test(config=config):
            error = refusal(config)
            assert error.key == "launcher"
            assert "+launcher=slurm" in str(error)


def test_an_unknown_backend_is_refused():
    """The key is the group's own, but may be overridden by mistake."""
    assert "did you mean 'slurm'" in str(refusal({"launcher": {"backend": "slrum"}}))


def test_local_settings_are_read_for_launcher_local():
    """Each launcher has its own dataclass."""
    assert resolve(local(max_agents=3)).launcher == LocalSettings(max_agents=3)


def test_the_least_wall_time_lies_between_a_minute_and_the_wall_time(subtests):
    """The refusal comes before anything is submitted."""
    for settings, why in [
        ({"time_min": 5}, "needs launcher.time"),
        ({"time_min": 5, "time": "UNLIMITED"}, "needs launcher.time"),
        ({"time_min": "0:30", "time": "60"}, "at least a minute"),
        ({"time_min": "90", "time": "1:00:00"}, "at most launcher.time (1:00:00)"),
        ({"time_min": "soon", "time": "60"}, "allowed is"),
    ]:
        with subtests.test(settings=settings, why=why):
            error = refusal(slurm(**settings))
            assert error.key == "launcher.time_min" and why in str(error)


def test_pools_are_read_like_the_settings_that_they_replace():
    """On the command line and in YAML; their nodes are those of the run."""
    pools = [{"partition": "gpu", "nodes": 2}, {"nodes": 14, "time": 90, "time_min": 5}]
    overrides = ["nodes=1:16", "launcher.pools=[...]"]
    settings = resolve({**slurm(pools=pools), "nodes": "1:16"}, overrides=overrides)
    first, last = settings.shares
    assert (first[0], first[1].partition, first[1].time) == (range(2), "gpu", None)
    assert (last[0], last[1].partition, last[1].time) == (range(2, 16), None, "90")


def test_pools_that_cannot_work_are_refused(subtests):
    """Each error names the pool."""
    for pools, key, why in [
        ([{"nodes": 2}, {"nodes": 3}], "launcher.pools", "they have 5 nodes together"),
        ([{"nodes": 4}, {}], "launcher.pools.1.nodes", "at least 1"),
        ([{"nodes": 4, "partion": "x"}], "launcher.pools.0.partion", "partition"),
        ([{"nodes": 4, "time_min": 5}], "launcher.pools.0.time_min", "needs launcher.time"),
        ([{"nodes": 4, "harvest": "auto"}], "launcher.pools.0.harvest", "needs launcher.time"),
        ([{"nodes": 4, "throughput": 0}], "launcher.pools.0.throughput", "from 0.01 to 100"),
        ("gpu", "launcher.pools", "a list of mappings"),
        ([3], "launcher.pools.0", "a mapping"),
    ]:
        with subtests.test(pools=pools, key=key):
            error = refusal({**slurm(pools=pools), "nodes": "1:4"})
            assert error.key == key and why in str(error)


def test_replicas_have_equal_shares_of_a_batch():
    """ft=true: what a pool's workers could do more does not count."""
    pools = [{"nodes": 2}, {"nodes": 2, "throughput": 2}]
    error = refusal({**slurm(pools=pools), "nodes": "1:4", "ft": True})
    assert error.key == "launcher.pools.throughput" and "ft=true" in str(error)


def test_networks_are_checked_at_submission():
    """A name or a typing error would keep out everybody, or nobody."""
    given = {"allow_from": ["10.1.0.0/16", "fd00::/8", "10.2.3.4"]}
    found = resolve(slurm(rendezvous=given)).launcher.rendezvous
    assert found.allow_from == given["allow_from"]
    error = refusal(slurm(rendezvous={"allow_from": ["10.1.0.0/16", "cluster"]}))
    assert error.key == "launcher.rendezvous.allow_from" and "'cluster' is no network" in str(error)
    many = [f"10.{i // 100}.{i % 100}.1" for i in range(5000)]
    error = refusal(slurm(rendezvous={"allow_from": many}))
    assert error.key == "launcher.rendezvous.allow_from" and "[10.1.0.0/16]" in str(error)
    for given in (many[:3900], [f"10.0.{i // 256}.{i % 256}" for i in range(5000)]):
        assert resolve(slurm(rendezvous={"allow_from": given})).launcher.rendezvous
