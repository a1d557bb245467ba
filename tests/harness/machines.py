"""Network namespaces as machines."""

import os
import subprocess

from harness.launches import Started


class Machine:
    """A simulated host: a network namespace with one interface and its own host name."""

    def __init__(self, rank):
        self.rank, self.name, self.interface = rank, f"machine{rank}-{os.getpid()}", f"eth{rank}"
        self.address = f"10.77.0.{rank + 1}"
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name)
        self.enter = ("ip", "netns", "exec", self.name, *named)

    def connect(self):
        """Plugs its network cable in, if a test has pulled it out."""
        self.execute(f"ip link set {self.interface} up")

    def execute(self, words):
        """Runs a command in its network."""
        subprocess.run(["ip", "netns", "exec", self.name, *words.split()], check=True)

    def started(
        self,
        script,
        arguments,
        output_dir,
        *,
        config="2node_4gpu",
        launcher=None,
        env=None,
        enter=(),
    ):
        """Starts a launcher on this host as a user would, with 2 x 2 processes instead of the 2 x 4
        of the YAML.
        """
        typed = (
            "--machine_rank",
            str(self.rank),
            "--main_process_ip",
            "10.77.0.1",
            "--num_processes",
            "4",
        )
        return Started(
            config,
            script,
            arguments,
            output_dir=output_dir,
            launcher=typed if launcher is None else launcher,
            host=(*self.enter, *enter),
            env={"GLOO_SOCKET_IFNAME": self.interface, "CUDA_VISIBLE_DEVICES": "", **(env or {})},
        )
