// What norms are told.
#pragma once
#include "device.cuh"

struct Norm {
    const float *x; // [rows, stride]
    const float *weight;
    const float *bias; // or none
    float *out;        // [rows, out_stride], or none
    u16 *half_out;     // [rows, half_stride], or none
    float eps;
    u32 stride, out_stride, half_stride;
    u32 n;          // elements of a group
    u32 groups;     // of a row
    u32 weight_len; // n, or groups * n
    u32 is_layer;
};
static_assert(sizeof(Norm) == 72, "as in parameters.rs");
