// Compiled with -DRUDA_CUDA_SOURCE="cuda.cu" (or a changed copy) and -DRUDA_INSTANCES="a file of INSTANCE(name) lines".
#include "simulator.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include RUDA_CUDA_SOURCE

Index threadIdx, blockIdx, gridDim;

namespace simulator {
namespace {

constexpr size_t kStack = 64 * 1024;
constexpr int kValue = 8;

enum class State { kReady, kAtShuffle, kAtBarrier, kDone };

struct Fiber {
  ucontext_t context;
  State state;
  std::vector<char> stack = std::vector<char>(kStack);
};

struct Warp {
  // Two sets of posted values: a lane can be one exchange ahead of the others, never two.
  char posted[2][kWarp][kValue];
  int turn[kWarp];
};

std::vector<Fiber> fibers;
Warp warps[kMaxWarps];
ucontext_t scheduler;
bool in_block;      // false while a barrier-free kernel runs as a plain loop
std::string error;  // of the block that is running
Kernel kernel;
void** kernel_arguments;

void wait(State state) {
  if (!in_block) {
    error = "a kernel without barriers reached one";
    return;
  }
  Fiber& fiber = fibers[threadIdx.x];
  fiber.state = state;
  swapcontext(&fiber.context, &scheduler);
}

void fiber_main() {
  kernel(kernel_arguments);
  wait(State::kDone);
}

// Runs a warp until every lane waits for the block or has ended.
void run_warp(int warp) {
  for (;;) {
    int count[4] = {};
    for (int lane = 0; lane < kWarp; ++lane) {
      const unsigned thread = static_cast<unsigned>(warp * kWarp + lane);
      Fiber& fiber = fibers[thread];
      if (fiber.state == State::kReady) {
        threadIdx.x = thread;
        swapcontext(&scheduler, &fiber.context);
      }
      ++count[static_cast<int>(fiber.state)];
    }
    const int shuffling = count[static_cast<int>(State::kAtShuffle)];
    if (shuffling == 0) return;
    if (shuffling != kWarp) {
      error = "a shuffle was reached by " + std::to_string(shuffling) + " of 32 lanes";
      return;
    }
    for (int lane = 0; lane < kWarp; ++lane) fibers[warp * kWarp + lane].state = State::kReady;
  }
}

void run_block(int threads, std::mt19937& random) {
  if (fibers.size() < static_cast<size_t>(threads)) fibers.resize(threads);
  for (int thread = 0; thread < threads; ++thread) {
    Fiber& fiber = fibers[thread];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.state = State::kReady;
  }
  std::vector<int> order(threads / kWarp);
  for (size_t w = 0; w < order.size(); ++w) {
    order[w] = static_cast<int>(w);
    std::fill(warps[w].turn, warps[w].turn + kWarp, 0);
  }
  std::shuffle(order.begin(), order.end(), random);
  while (error.empty()) {
    for (const int warp : order) run_warp(warp);
    const auto at = [&](State state) {
      return std::count_if(fibers.begin(), fibers.begin() + threads, [&](const Fiber& f) { return f.state == state; });
    };
    if (at(State::kDone) == threads) return;
    if (error.empty() && at(State::kAtBarrier) != threads) {
      error = "a barrier was reached by " + std::to_string(at(State::kAtBarrier)) + " of " + std::to_string(threads) +
              " threads";
    }
    for (int thread = 0; thread < threads; ++thread) fibers[thread].state = State::kReady;
  }
}

}  // namespace

void wait_for_block() { wait(State::kAtBarrier); }

void exchange(const void* value, void* out, unsigned long size, int source) {
  const unsigned lane = threadIdx.x % kWarp;
  Warp& warp = warps[threadIdx.x / kWarp];
  const int turn = warp.turn[lane]++ % 2;
  std::memcpy(warp.posted[turn][lane], value, size);
  wait(State::kAtShuffle);
  std::memcpy(out, warp.posted[turn][source], size);
}

#define INSTANCE(barriers, ...) {#__VA_ARGS__, [](void** a) { call<&__VA_ARGS__>(&__VA_ARGS__, a); }, barriers},
const Instance kInstances[] = {
#include RUDA_INSTANCES
};

// Runs a kernel to its end. Returns an empty string, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* simulate(const char* name, int64_t blocks, int threads,
                                                                       void** arguments, unsigned seed) {
  error.clear();
  const auto found = std::find_if(std::begin(kInstances), std::end(kInstances),
                                  [&](const Instance& instance) { return std::strcmp(instance.name, name) == 0; });
  if (found == std::end(kInstances)) {
    error = std::string("the simulator was built without ") + name;
  } else if (threads % kWarp != 0 || threads > kWarp * kMaxWarps) {
    error = "a block needs whole warps, 1024 threads at most";
  }
  if (!error.empty()) return error.c_str();
  std::mt19937 random(seed);
  gridDim.x = static_cast<unsigned>(blocks);
  kernel = found->kernel;
  kernel_arguments = arguments;
  in_block = found->has_barriers;
  for (int64_t block = 0; block < blocks && error.empty(); ++block) {
    blockIdx.x = static_cast<unsigned>(block);
    if (in_block) {
      run_block(threads, random);
      continue;
    }
    for (int thread = 0; thread < threads; ++thread) {
      threadIdx.x = static_cast<unsigned>(thread);
      kernel(arguments);
    }
  }
  return error.c_str();
}

}  // namespace simulator
