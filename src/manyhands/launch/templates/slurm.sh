#!/bin/bash
# {{job}} on {{nodes_text}}, {{tasks_text}} on each.
# Written by  manyhands launch slurm. Edit it as you like, and submit it with  sbatch FILE.
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{tasks_per_node}}
{{options}}
#SBATCH --output={{name}}-%j.log
# A requeued job appends to the same log.
#SBATCH --open-mode=append
#SBATCH --requeue
# Slurm sends this script SIGUSR1 {{warn_s}} s before the job ends: time to save a checkpoint.
#SBATCH --signal=B:USR1@{{warn_s}}
{{setup}}

set -u  # only now: scripts that set up an environment often fail under it

# The run's key. Anyone who has it can join the run, so it is read from a file that only you can read and
# passed on in the environment, never on a command line, where every user of the host could see it.
KEY_FILE={{key_file}}
if [ ! -s "$KEY_FILE" ]; then
    echo "error: there is no key in $KEY_FILE. Make one:" >&2
    echo "  mkdir -p \"$(dirname "$KEY_FILE")\" && (umask 077; manyhands key > \"$KEY_FILE\")" >&2
    exit 2
fi
case "$(stat -L -c %a "$KEY_FILE")" in
    600 | 400) ;;
    *)
        echo "error: other users can read or change $KEY_FILE. Type:  chmod 600 \"$KEY_FILE\"" >&2
        exit 2
        ;;
esac
MANYHANDS_KEY=$(<"$KEY_FILE")
export MANYHANDS_KEY

# The run folder, on a disk that all nodes share. If it exists, the job was requeued: resume from the last
# checkpoint, with the flags of the first start.
RUN={{run}}
if [ -e "$RUN/config.json" ]; then
    command=(manyhands resume "$RUN" --on env)
else
    command=(
        manyhands train {{quoted_job}} --on env --run-dir "$RUN"
        {{flags}}
    )
fi

# One process per task: the first one coordinates, the others are its agents. If one dies, srun keeps the
# others running, and the run continues without it.
step='' warned='' again=''
on_warning() {
    again=1
    if [ -n "$step" ] && [ -z "$warned" ]; then
        warned=1
        kill -USR1 "$step"
    fi
}
trap on_warning USR1
mkdir -p "$(dirname "$RUN")" && touch "$RUN.started"
srun --export=ALL --kill-on-bad-exit=0{{srun_cpus}} "${command[@]}" &
step=$!
[ -z "$again" ] || on_warning

# A signal interrupts `wait`, so wait again. Waiting for a process that has already been reaped returns 127.
code=127 again=1
while [ -n "$again" ]; do
    again=''
    wait "$step"
    got=$?
    [ "$got" -eq 127 ] || code=$got
done

# srun returns the highest exit code of all tasks, which may be that of a lost host. So ask the run how it
# ended.
if [ "$RUN/summary.json" -nt "$RUN.started" ]; then
    case "$(sed -n 's/.*"outcome": "\([a-z-]*\)".*/\1/p' "$RUN/summary.json")" in
        preempted) code=75 ;;
        diverged) code=65 ;;
        finished | early-stopped | limit | target) code=0 ;;
    esac
fi
rm -f "$RUN.started"

# 75: preempted, with a checkpoint saved. Requeue the job; its next start resumes the run.
if [ "$code" -eq 75 ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -lt {{requeues}} ]; then
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "The job was requeued $SLURM_RESTART_COUNT times. Continue with:  manyhands resume $RUN" >&2
    fi
fi
exit "$code"
