"""Network namespaces as machines."""

import os

from harness.launches import COLD, Started


class Machine:
    """A simulated host: a network namespace with one interface and its own host name."""

    def __init__(self, rank):
        self.rank, self.name, self.interface = rank, f"machine{rank}-{os.getpid()}", f"eth{rank}"
        self.address = f"10.77.0.{rank + 1}"
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name)
        self.enter = ("ip", "netns", "exec", self.name, *named)

    def started(self, script, arguments, output_dir, launcher="", env=(), config=None, **options):
        """Starts a launcher on this host as a user would: by default with 2 x 2 processes instead of
        the 2 x 4 of the YAML.

        Args:
            launcher (str): what to start instead of `accelerate launch`; with `config`, arguments.
        """
        if not launcher:
            config, launcher = "2node_4gpu", "--num_processes 4"
        if config:
            launcher += f" --machine_rank {self.rank} --main_process_ip 10.77.0.1"
        options |= dict(host=self.enter) if COLD in os.environ else dict(machine=self.name)
        env = {"GLOO_SOCKET_IFNAME": self.interface, "CUDA_VISIBLE_DEVICES": "", **dict(env)}
        options |= dict(output_dir=output_dir, launcher=launcher.split(), env=env)
        return Started(config, script, arguments, **options)
