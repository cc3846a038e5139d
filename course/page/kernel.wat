;; y = scale * (W x), W in int8 with one scale per row: the page's only hot loop.
;;
;; W [rows, cols] int8, scale [rows] f32, x [tokens, cols] f32, y [tokens, rows] f32, addresses in bytes.
;; cols is a multiple of 8. Eight weights at a time become two vectors of four f32.
(module
  (import "page" "memory" (memory 1))

  ;; One token.
  (func (export "times1")
    (param $w i32) (param $scale i32) (param $x i32) (param $y i32) (param $rows i32) (param $cols i32)
    (local $end i32) (local $at i32) (local $eight v128) (local $low v128) (local $high v128)
    loop $row
      local.get $w  local.get $cols  i32.add  local.set $end
      local.get $x  local.set $at
      v128.const i32x4 0 0 0 0  local.set $low
      v128.const i32x4 0 0 0 0  local.set $high
      loop $column
        local.get $w  v128.load8x8_s  local.set $eight
        local.get $low
        local.get $eight  i32x4.extend_low_i16x8_s  f32x4.convert_i32x4_s
        local.get $at  v128.load  f32x4.mul  f32x4.add  local.set $low
        local.get $high
        local.get $eight  i32x4.extend_high_i16x8_s  f32x4.convert_i32x4_s
        local.get $at  v128.load offset=16  f32x4.mul  f32x4.add  local.set $high
        local.get $at  i32.const 32  i32.add  local.set $at
        local.get $w  i32.const 8  i32.add  local.tee $w
        local.get $end  i32.lt_u  br_if $column
      end
      local.get $low  local.get $high  f32x4.add  local.set $low
      local.get $y
      local.get $low  f32x4.extract_lane 0  local.get $low  f32x4.extract_lane 1  f32.add
      local.get $low  f32x4.extract_lane 2  local.get $low  f32x4.extract_lane 3  f32.add  f32.add
      local.get $scale  f32.load  f32.mul
      f32.store
      local.get $y  i32.const 4  i32.add  local.set $y
      local.get $scale  i32.const 4  i32.add  local.set $scale
      local.get $rows  i32.const 1  i32.sub  local.tee $rows
      br_if $row
    end
  )

  ;; Four tokens at once: every weight is unpacked once for all of them. rows4 = 4 * rows, cols4 = 4 * cols.
  (func (export "times4")
    (param $w i32) (param $scale i32) (param $x i32) (param $y i32) (param $rows i32) (param $cols i32)
    (local $end i32) (local $at i32) (local $out i32) (local $cols4 i32) (local $rows4 i32)
    (local $b i32) (local $c i32) (local $d i32)
    (local $eight v128) (local $low v128) (local $high v128)
    (local $s0 v128) (local $s1 v128) (local $s2 v128) (local $s3 v128) (local $factor f32)
    local.get $cols  i32.const 4  i32.mul  local.set $cols4
    local.get $rows  i32.const 4  i32.mul  local.set $rows4
    loop $row
      local.get $w  local.get $cols  i32.add  local.set $end
      local.get $x  local.set $at
      local.get $at  local.get $cols4  i32.add  local.tee $b
      local.get $cols4  i32.add  local.tee $c
      local.get $cols4  i32.add  local.set $d
      v128.const i32x4 0 0 0 0  local.set $s0
      v128.const i32x4 0 0 0 0  local.set $s1
      v128.const i32x4 0 0 0 0  local.set $s2
      v128.const i32x4 0 0 0 0  local.set $s3
      loop $column
        local.get $w  v128.load8x8_s  local.tee $eight
        i32x4.extend_low_i16x8_s  f32x4.convert_i32x4_s  local.set $low
        local.get $eight  i32x4.extend_high_i16x8_s  f32x4.convert_i32x4_s  local.set $high
        local.get $s0
        local.get $at  v128.load  local.get $low  f32x4.mul  f32x4.add
        local.get $at  v128.load offset=16  local.get $high  f32x4.mul  f32x4.add  local.set $s0
        local.get $s1
        local.get $b  v128.load  local.get $low  f32x4.mul  f32x4.add
        local.get $b  v128.load offset=16  local.get $high  f32x4.mul  f32x4.add  local.set $s1
        local.get $s2
        local.get $c  v128.load  local.get $low  f32x4.mul  f32x4.add
        local.get $c  v128.load offset=16  local.get $high  f32x4.mul  f32x4.add  local.set $s2
        local.get $s3
        local.get $d  v128.load  local.get $low  f32x4.mul  f32x4.add
        local.get $d  v128.load offset=16  local.get $high  f32x4.mul  f32x4.add  local.set $s3
        local.get $at  i32.const 32  i32.add  local.set $at
        local.get $b  i32.const 32  i32.add  local.set $b
        local.get $c  i32.const 32  i32.add  local.set $c
        local.get $d  i32.const 32  i32.add  local.set $d
        local.get $w  i32.const 8  i32.add  local.tee $w
        local.get $end  i32.lt_u  br_if $column
      end
      local.get $scale  f32.load  local.set $factor
      local.get $y  local.set $out
      local.get $out
      local.get $s0  f32x4.extract_lane 0  local.get $s0  f32x4.extract_lane 1  f32.add
      local.get $s0  f32x4.extract_lane 2  local.get $s0  f32x4.extract_lane 3  f32.add  f32.add
      local.get $factor  f32.mul  f32.store
      local.get $out  local.get $rows4  i32.add  local.tee $out
      local.get $s1  f32x4.extract_lane 0  local.get $s1  f32x4.extract_lane 1  f32.add
      local.get $s1  f32x4.extract_lane 2  local.get $s1  f32x4.extract_lane 3  f32.add  f32.add
      local.get $factor  f32.mul  f32.store
      local.get $out  local.get $rows4  i32.add  local.tee $out
      local.get $s2  f32x4.extract_lane 0  local.get $s2  f32x4.extract_lane 1  f32.add
      local.get $s2  f32x4.extract_lane 2  local.get $s2  f32x4.extract_lane 3  f32.add  f32.add
      local.get $factor  f32.mul  f32.store
      local.get $out  local.get $rows4  i32.add
      local.get $s3  f32x4.extract_lane 0  local.get $s3  f32x4.extract_lane 1  f32.add
      local.get $s3  f32x4.extract_lane 2  local.get $s3  f32x4.extract_lane 3  f32.add  f32.add
      local.get $factor  f32.mul  f32.store
      local.get $y  i32.const 4  i32.add  local.set $y
      local.get $scale  i32.const 4  i32.add  local.set $scale
      local.get $rows  i32.const 1  i32.sub  local.tee $rows
      br_if $row
    end
  )
)
