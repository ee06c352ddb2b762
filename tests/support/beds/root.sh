#!/bin/sh
# A root file system of Debian's packages, unpacked and never run: root.sh FOLDER ARCHITECTURE PACKAGE...
# It is made once, and is whole where it is there.
set -eu
folder=$1 architecture=$2
shift 2
[ ! -e "$folder" ] || exit 0
beds=$(dirname "$0")
mkdir -p "$(dirname "$folder")"
trap 'rm -rf "$folder.new"' EXIT
"$beds/debian_sources.sh" deb |
    mmdebstrap --quiet --mode=root --variant=extract --architectures="$architecture" \
        --include="$(echo base-files coreutils dash grep sed "$*" | tr ' ' ,)" '' "$folder.new" -
mv "$folder.new" "$folder"
