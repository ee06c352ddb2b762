/* A program that embeds Python, and runs the script EMBEDDED and nothing else, whatever its arguments are: as a
 * frozen program does. EMBEDDED_AS=self: sys.executable is this program; words: so it is, and Python has its
 * arguments, as PyInstaller gives them; path: Python looks for one of its own on PATH, as after Py_Initialize(). */
#include <Python.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    const char *how = getenv("EMBEDDED_AS"), *script = getenv("EMBEDDED");
    if (how == NULL || script == NULL) return 99;
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.parse_argv = 0;
    PyStatus status = PyStatus_Ok();
    if (strcmp(how, "path") != 0)
        status = PyConfig_SetBytesString(&config, &config.executable, argv[0]);
    if (!PyStatus_Exception(status) && strcmp(how, "words") == 0)
        status = PyConfig_SetBytesArgv(&config, argc, argv);
    if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status)) Py_ExitStatusException(status);
    FILE *file = fopen(script, "r");
    int r = file == NULL ? 98 : PyRun_SimpleFileEx(file, script, 1);
    if (Py_FinalizeEx() < 0) return 120;
    return r == 0 ? 0 : 1;
}
