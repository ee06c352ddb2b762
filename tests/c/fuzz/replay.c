/* replay.c: a fuzz target without libFuzzer: each file that is named is one input. For any compiler, and for gcov. */
#include <stdint.h>
#include <stdio.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **names) {
    static uint8_t bytes[1 << 20];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(names[i], "rb");
        if (file == NULL) return 1;
        size_t size = fread(bytes, 1, sizeof bytes, file);
        (void)fclose(file);
        (void)LLVMFuzzerTestOneInput(bytes, size);
    }
    (void)printf("%d inputs\n", argc - 1);
    return 0;
}
