/* Ends the target that an ISA file has chosen: its last line. */
#if defined(SA_EMULATED)
#elif defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
