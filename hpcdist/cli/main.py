"""The command `hpcdist`: imports a subcommand when it is called, and prints errors as one line."""

import sys
from collections.abc import Sequence

import click

from hpcdist.cli.output import echo
from hpcdist.errors import ExitCode, HpcdistError

#: Subcommand -> its line in the help.
COMMANDS = {
    "new": "Write a training script to begin with, which runs at once.",
    "run": "Start a program on several ranks of this machine, of given hosts, or of a Slurm allocation.",
    "submit": "Write a batch script for a program, show it, and submit it.",
    "status": "Show what a run has done: attempts, newest checkpoint, metrics, and what is to follow.",
    "stop": "Ask a job to save and to end.",
    "logs": "Print the log files of all ranks as one, by time.",
    "ckpt": "List, verify, compare, convert and remove checkpoints.",
    "report": "Write a page about a run: metrics, where each rank's time goes, goodput, checkpoints.",
    "trace": "Write the steps of all ranks on one clock, for ui.perfetto.dev.",
    "bench": "Time sums over ranks, training steps, checkpoints and parameter servers on this machine.",
    "doctor": "Look for what is wrong with MPI, launcher, cores, GPUs, links, clocks and folders.",
}


class _Commands(click.Group):
    """A group that imports a command when it is called, so that help and inspection take less than half a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        match cmd_name:
            case "new":
                from hpcdist.cli.new import command as subcommand
            case "run":
                from hpcdist.cli.run import command as subcommand
            case "submit":
                from hpcdist.cli.submit import command as subcommand
            case "status":
                from hpcdist.cli.status import status as subcommand
            case "stop":
                from hpcdist.cli.status import stop as subcommand
            case "logs":
                from hpcdist.cli.logs import command as subcommand
            case "ckpt":
                from hpcdist.cli.ckpt import command as subcommand
            case "report":
                from hpcdist.cli.report import command as subcommand
            case "trace":
                from hpcdist.cli.trace import command as subcommand
            case "bench":
                from hpcdist.cli.bench import command as subcommand
            case "doctor":
                from hpcdist.cli.doctor import command as subcommand
            case _:
                return None
        return subcommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hpcdist", message="%(version)s")
def command() -> None:
    """Run and inspect training jobs on MPI.

    Completion for bash: eval "$(_HPCDIST_COMPLETE=bash_source hpcdist)"; for zsh, zsh_source.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with a code of `hpcdist.errors`. An error is printed as one line.

    Args:
        arguments: arguments of the command; None for the arguments of this process.
    """
    sys.exit(_code_of(arguments))


def _code_of(arguments: Sequence[str] | None) -> int:
    """Run the command, print its error if it fails, and return the exit code."""
    try:
        code = command.main(args=arguments, prog_name="hpcdist", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.Abort:
        return 128 + 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "hpcdist"
        text = _one_line(error.format_message())
        return _fail(f"{path}: {text} See {path} --help.", ExitCode.USAGE)
    except click.ClickException as error:
        return _fail(f"hpcdist: {_one_line(error.format_message())}", ExitCode.USAGE)
    except HpcdistError as error:
        text = _one_line(str(error))
        if not text.startswith("hpcdist "):
            text = f"hpcdist: {text}"
        return _fail(text, error.exit_code)
    except UnicodeError:
        text = (
            "hpcdist: expected text that can be printed here, got other bytes; set LANG to UTF-8."
        )
        return _fail(text, ExitCode.USAGE)
    except OSError as error:
        reason = f"{error.strerror or error}"
        if error.filename:
            reason += f" for {error.filename}"
        text = f"hpcdist: expected files that can be read and written, got {reason}; look at its path and mode."
        return _fail(_one_line(text), ExitCode.CHECKPOINT_IO)
    if isinstance(code, int):
        return code
    return ExitCode.DONE


def _fail(text: str, code: int) -> int:
    """Print an error; return the exit code."""
    echo(text, err=True)
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())
