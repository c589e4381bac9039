// Functions that binding.py calls through ctypes. They know nothing of the dispatcher and throw nothing.
#pragma once

#define RUDA_EXPORT extern "C" __attribute__((visibility("default")))
