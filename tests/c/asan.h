/* asan.h: what the sanitizer is told where no variable of ours comes: in agents on other nodes. See asan.sh. */
const char *__asan_default_options(void);
__attribute__((weak, visibility("default"))) const char *__asan_default_options(void) {
    return "detect_leaks=0:verify_asan_link_order=0:abort_on_error=1:detect_stack_use_after_return=0";
}
