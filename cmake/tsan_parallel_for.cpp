// Linked into the ThreadSanitizer build only, around torch_parallel_for (-Wl,--wrap). The OpenMP runtime beneath it is not
// instrumented, so ThreadSanitizer cannot see that a parallel region forks after what came before and joins before what
// comes after, and would report both as races. Races between the threads of one region are still seen.
#include <torch/csrc/stable/c/shim.h>

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);

namespace {

struct Region {
  ParallelFunc body;
  void* context;
  char forked, joined;  // their addresses are what the sanitizer synchronises on
};

void run(int64_t begin, int64_t end, void* context) {
  auto* region = static_cast<Region*>(context);
  __tsan_acquire(&region->forked);
  region->body(begin, end, region->context);
  __tsan_release(&region->joined);
}

}  // namespace

extern "C" AOTITorchError __real_torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc body,
                                                    void* context);

extern "C" AOTITorchError __wrap_torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc body,
                                                    void* context) {
  Region region{body, context, 0, 0};
  __tsan_release(&region.forked);
  const AOTITorchError status = __real_torch_parallel_for(begin, end, grain_size, run, &region);
  __tsan_acquire(&region.joined);
  return status;
}
