#!/bin/sh
# Stands in for ssh: drops the options, takes the host, runs the rest in that host's namespaces, in the same folder.
# VIRTUAL_HOSTS holds ADDRESS=PID pairs, PID being the first process of that host.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
for pair in $VIRTUAL_HOSTS; do
  if [ "${pair%=*}" = "$host" ]; then
    # shellcheck disable=SC2016  # the inner shell expands these
    exec nsenter --target "${pair#*=}" --net --uts --ipc --mount --pid \
      sh -c 'cd "$1" && export TMPDIR=/run/tmp && eval "$2"' in_host "$PWD" "$*"
  fi
done
echo "in_host.sh: expected one of $VIRTUAL_HOSTS, got '$host'" >&2
exit 255
