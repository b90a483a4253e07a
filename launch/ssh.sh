#!/usr/bin/env bash
# Train on a few machines without a scheduler. In the repository's folder, on one of them or elsewhere:
#   bash launch/ssh.sh hosts.txt config/train_gpt2.py --learning_rate=3e-4
#   bash launch/ssh.sh hosts.txt launch/bandwidth.py   # measures the network instead
# hosts.txt has a host on each line, in ssh's form, with a name or address that the other hosts reach, too.
# Ctrl-C saves the run and ends it on all hosts; the same command continues it. See docs/launch.md.

# --- change these; environment variables with the same names override them ---
processes=${processes:-8}              # on each host: the number of its GPUs
port=${port:-29500}                    # for torchrun, on the first host
folder=${folder:-$PWD}                 # the repository's folder on all hosts
python=${python:-$(command -v python)} # on all hosts, with the same version of torch
setup=${setup:-:}                      # a command to run first on each host: 'export NCCL_SOCKET_IFNAME=eth0'

# --- nothing below needs to change ---
set -u
if [[ ! -f "${1:-}" || $1 = *.py ]]; then
    echo "error: '${1:-}' is not a file of hosts: bash launch/ssh.sh hosts.txt config/x.py --key=value" >&2
    exit 1
fi
mapfile -t hosts < <(grep -v -e '^ *#' -e '^ *$' "$1")
shift
program=(train.py --save_minutes=10 "$@" --init_from=auto)
case ${1:-} in launch/*) program=("$@") ;; esac
endpoint=${hosts[0]##*@}:$port

# The standard input on each host is a pipe that this script keeps open and never writes to. When the script
# ends, by Ctrl-C, a kill or a lost connection, the host reads the end of the pipe and sends torchrun the
# signal to save. The output goes to a file, so that a run can still print after its connection is lost.
# shellcheck disable=SC2016  # the shell on the host expands the variables
on_host='log=$1; shift; : > "$log"; "$@" < /dev/null >> "$log" 2>&1 & run=$!;
    { read -r _; kill -TERM $run; } <&3 > /dev/null 2>&1 & watch=$!;
    tail -n +1 -f --pid=$run "$log"; wait $run; status=$?; kill $watch 2> /dev/null; exit $status'
on_host=${on_host//$'\n'/} # one line, which every host's shell reads in the same way
pipe=$(mktemp -u)
mkfifo "$pipe"
exec 4<> "$pipe"
exec 5< "$pipe"
rm "$pipe"
trap 'exec 4>&-' INT TERM HUP USR1

# Run a command on all hosts and wait for it. The first host that fails ends the others.
# {HOST}, {NODE} and {IS_FIRST} in the command are replaced for each host.
on_each_host() {
    local node host command pid pids=() status=0
    for node in "${!hosts[@]}"; do
        host=${hosts[$node]}
        command=("${@//\{HOST\}/${host##*@}}")
        command=("${command[@]//\{NODE\}/$node}")
        command=("${command[@]//\{IS_FIRST\}/$((node == 0))}")
        {
            trap '' INT # ignore Ctrl-C: ssh prints the host's output until the run has ended
            command=(bash -c "$on_host" run "ssh-${host##*@}.log" "${command[@]}")
            # shellcheck disable=SC2029  # this shell expands the variables, and quotes what the host reads
            ssh -o BatchMode=yes "$host" \
                "$setup; cd $(printf %q "$folder") && exec $(printf '%q ' "${command[@]}") 3<&0" || {
                echo "$host: ended with exit code $?" >&2
                kill -USR1 $$
                false
            }
        } <&5 4>&- 5<&- &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        until wait "$pid"; do
            # A signal may have interrupted wait while the process still runs.
            kill -0 "$pid" 2> /dev/null || { status=1; break; }
        done
    done
    return $status
}

on_each_host "$python" launch/check_node.py --name='{HOST}' --node='{NODE}' --nodes=${#hosts[@]} \
    --endpoint="$endpoint" --processes="$processes" "${program[@]}" &&
    on_each_host "$python" -m torch.distributed.run --nnodes=${#hosts[@]} --nproc_per_node="$processes" \
        --max-restarts=3 --rdzv_backend=c10d --rdzv_endpoint="$endpoint" --rdzv_conf=is_host='{IS_FIRST}' \
        --local_addr='{HOST}' "${program[@]}"
