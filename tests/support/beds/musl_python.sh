#!/bin/sh
# A CPython whose libc is musl, as Alpine's is: musl_python.sh FOLDER ZIG, where ZIG is the program of the package ziglang.
# Debian has musl's loader and no such Python, so it is compiled from Debian's sources of Python and zlib, in minutes,
# once: with what pip and our tests need, and without the rest (no ssl, no ctypes).
set -eu
folder=$1 zig=$2
[ ! -e "$folder" ] || exit 0
beds=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

"$beds/debian_sources.sh" deb-src >sources.list
mkdir -p lists/partial
options="-o Dir::Etc::SourceList=$work/sources.list -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists=$work/lists"
apt-get -qq $options update
python=$(apt-cache depends python3-minimal | sed -n 's/.*Depends: \(python3\.[0-9]*\)-minimal$/\1/p')
apt-get -qq $options source --download-only "$python" zlib
for archive in *.orig.tar.*; do tar xf "$archive"; done

export CC="$zig cc -target x86_64-linux-musl" CFLAGS="-O2 -g0 -fPIC -Wno-date-time" AR="$zig ar" RANLIB="$zig ranlib"
(cd zlib-* && ./configure --static --prefix="$work/zlib" && make -j"$(nproc)" install) >log 2>&1 || { tail -n 40 log; exit 1; }
(
    cd Python-* &&
        MODULE_BUILDTYPE=static ./configure --host=x86_64-linux-musl --build=x86_64-linux-musl --prefix="$folder" --with-ensurepip=install \
            --disable-test-modules ZLIB_CFLAGS="-I$work/zlib/include" ZLIB_LIBS="-L$work/zlib/lib -lz" &&
        make -j"$(nproc)" && make install
) >>log 2>&1 || { tail -n 40 log; rm -rf "$folder"; exit 1; }
