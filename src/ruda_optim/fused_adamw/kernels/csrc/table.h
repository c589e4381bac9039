// The launch description, as kernels/tables.py lays it out: one int64 column per tensor. A test compares the numbers.
#pragma once

namespace ruda {

enum Field {
  kParam,
  kParamOut,
  kGrad,
  kExpAvg,
  kExpAvgOut,
  kExpAvgSq,
  kExpAvgSqOut,
  kMaxExpAvgSq,
  kMaxExpAvgSqOut,
  kCopy,
  kRemainder,
  kNumel,
  kFlags,
  kCoefficientRow,
  kLayout,
  kStep,
  kFields,
};

enum Flag : long long {
  kGradFp16 = 1,
  kGradBf16 = 2,
  kCopyFp16 = 4,
  kCopyBf16 = 8,
  kAmsgrad = 16,
  kFirst = 32,
  kSplit = 64,
  kStrided = 128,
  kAligned = 256,
  kMomentsBf16 = 512,
  kMomentsPacked = 1024,
};

// The order of LAYOUT_ROLES: whose strides stand where in a layout record.
enum Role { kRoleParam, kRoleGrad, kRoleExpAvg, kRoleExpAvgSq, kRoleMaxExpAvgSq, kRoleCopy, kRoleRemainder, kRoles };

}  // namespace ruda
