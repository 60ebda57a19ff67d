// Multiplies rows of weights by one token with llama.cpp's kernel of a format, as `gemv` where its
// weights are repacked for Arm, or as a dot product (`dot`) of each row: `ggml FORMAT KERNEL TIMES`.
// Prints the bytes of the weights, or 0 if there is no such kernel.
#include "ggml-cpu.h"
#include "ggml.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 64
#define COLS 2048

typedef void gemv(int n, float *out, size_t stride, const void *weights, const void *x, int rows, int cols);

// Of repack.h, those that processors with the int8 dot product get.
gemv ggml_gemv_q4_0_4x4_q8_0, ggml_gemv_q8_0_4x4_q8_0, ggml_gemv_iq4_nl_4x4_q8_0, ggml_gemv_mxfp4_4x4_q8_0;
gemv ggml_gemv_q4_K_8x4_q8_K, ggml_gemv_q5_K_8x4_q8_K, ggml_gemv_q6_K_8x4_q8_K;

static const struct {
    const char *format;
    gemv *kernel;
} GEMVS[] = {
    {"q4_0", ggml_gemv_q4_0_4x4_q8_0},     {"q8_0", ggml_gemv_q8_0_4x4_q8_0}, {"iq4_nl", ggml_gemv_iq4_nl_4x4_q8_0},
    {"mxfp4", ggml_gemv_mxfp4_4x4_q8_0},   {"q4_K", ggml_gemv_q4_K_8x4_q8_K}, {"q5_K", ggml_gemv_q5_K_8x4_q8_K},
    {"q6_K", ggml_gemv_q6_K_8x4_q8_K},
};

int main(int argc, char **argv) {
    if (argc != 4) return 1;
    int type = 0, times = atoi(argv[3]);
    while (type < GGML_TYPE_COUNT && (!ggml_type_name(type) || strcmp(ggml_type_name(type), argv[1]))) type++;
    if (type == GGML_TYPE_COUNT) return puts("0") < 0;
    const struct ggml_type_traits_cpu *traits = ggml_get_type_traits_cpu(type);
    size_t row = ggml_row_size(type, COLS), x_row = ggml_row_size(traits->vec_dot_type, COLS);
    char *weights = malloc(ROWS * row), *x = malloc(x_row);
    memset(weights, 0x11, ROWS * row);
    memset(x, 1, x_row);
    float out[ROWS];
    gemv *kernel = NULL;
    for (size_t i = 0; i < sizeof GEMVS / sizeof *GEMVS && !strcmp(argv[2], "gemv"); i++) {
        if (!strcmp(GEMVS[i].format, argv[1])) kernel = GEMVS[i].kernel;
    }
    if (!kernel && strcmp(argv[2], "dot")) return puts("0") < 0;
    for (int i = 0; i < times; i++) {
        if (kernel) {
            kernel(COLS, out, ROWS, weights, x, 1, ROWS);
            continue;
        }
        for (int j = 0; j < ROWS; j++) traits->vec_dot(COLS, out + j, 0, weights + j * row, 0, x, 0, 1);
    }
    printf("%zu\n", ROWS * row);
    return 0;
}
