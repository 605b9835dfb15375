// Weights in float8 and NF4 (package internal/quant), for products that read them as they are stored.
#pragma once
#include "common.cuh"

constexpr int kMostParts = 3, kNested = 256;

// Part is a matrix.
struct Part {
  const uint8_t *codes, *nested;
  const float* scales;
  float offset;
  int rows;
};

__constant__ float nf4[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f,
    0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f,
    0.5626170039176941f, 0.7229568362236023f, 1.0f};
