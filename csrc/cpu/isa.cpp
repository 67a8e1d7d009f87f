// SPDX-License-Identifier: Apache-2.0
#include "isa.h"

#include <atomic>

namespace choreo {
namespace {

std::vector<const Kernels*> find_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(&kAvx512Kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    found.push_back(&kAvx2Kernels);
  }
#endif
  found.push_back(&kPortableKernels);
  return found;
}

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> found = find_kernels();
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : all_kernels()) names.emplace_back(kernels->name);
  return names;
}

const Kernels& active_kernels() {
  const Kernels* kernels = chosen.load();
  return kernels != nullptr ? *kernels : *all_kernels().front();
}

bool use_isa(const std::string& name) {
  if (name.empty()) {
    chosen = nullptr;
    return true;
  }
  for (const Kernels* kernels : all_kernels()) {
    if (name == kernels->name) {
      chosen = kernels;
      return true;
    }
  }
  return false;
}

}  // namespace choreo
