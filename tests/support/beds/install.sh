#!/bin/sh
# The Debian packages that a bed needs: install.sh PACKAGE... installs what is missing, as root; else it says what is.
set -eu
missing=
for package in "$@"; do
    case $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) in
    *" installed") ;;
    *) missing="$missing $package" ;;
    esac
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing:$missing" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
exec 9</var/lib/dpkg # one such script at a time, for the policy below
flock 9
# no service of a package is to be started: a bed starts its own
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
install() {
    apt-get install -qy --no-install-recommends -o DPkg::Lock::Timeout=600 $missing >&2
}
install || {
    apt-get update -qq >&2
    install
}
