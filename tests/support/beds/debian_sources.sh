#!/bin/sh
# The lines of sources.list for Debian's own packages, as this machine gets them: debian_sources.sh deb|deb-src
# (without its security archive, of which a mirror may have no sources).
set -eu
found=$(apt-get indextargets --format "$1 \$(REPO_URI) \$(RELEASE) \$(COMPONENT)" 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sort -u)
[ -n "$found" ] || { echo "apt-get update has not been run, or these are not Debian's packages" >&2; exit 1; }
echo "$found"
