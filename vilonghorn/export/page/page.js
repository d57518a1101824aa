// Classifies a picture with model.onnx and draws Grad-CAM over it. All requests are for files of this folder.
"use strict";
const $ = (id) => document.getElementById(id);
const RUNTIME = "./ort.wasm.bundle.min.mjs";
const WRITE = "vilonghorn export MODEL --to web --output FOLDER";
const TOP = 5, OPACITY = 0.65, SIDE = 768; // classes, opacity of the map's largest value, pixels of the canvas
const NAMES = 6; // of classes, in the heading
const MAX_PIXELS = 16e6; // of a canvas on phones; larger pictures are reduced by the browser first
const sinc = (x) => (x ? Math.sin(Math.PI * x) / (Math.PI * x) : 1);
const FILTERS = { // of Pillow: support, and weight at a distance
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  bicubic: [2, (x, a = Math.abs(x)) => (a < 1 ? (1.5 * a - 2.5) * a * a + 1 : a < 2 ? ((2.5 - 0.5 * a) * a - 4) * a + 2 : 0)],
  lanczos: [3, (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};
const TURBO = [[48, 18, 59], [70, 134, 251], [27, 229, 181], [164, 252, 60], [251, 185, 56], [227, 68, 10]];
let ort, session, about, result; // result: {scores, maps} of the picture
const roundEven = (x) => (x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x)); // as Python

// How timm's evaluation transform resizes and crops: [width, height] after resizing, [left, top] of the crop.
function place(width, height) {
  const { input_size: [, h, w], crop_pct, crop_mode } = about.preprocessing;
  const [th, tw] = [h, w].map((side) => Math.floor(side / crop_pct)), short = Math.min(width, height);
  const ratio = (crop_mode === "border" ? Math.max : Math.min)(height / th, width / tw);
  let size = [width, height].map((side) => roundEven(side / ratio));
  if (crop_mode === "squash") size = [tw, th];
  else if (crop_mode === "center" && th === tw)
    size = [width, height].map((side) => (side === short ? th : Math.trunc((th * side) / short)));
  const spare = [size[0] - w, size[1] - h];
  return { size, offset: spare.map((n) => (n >= 0 ? roundEven(n / 2) : -Math.floor(-n / 2))), crop: [w, h] };
}

// Pillow's resampling of 8-bit pixels along rows, bit by bit. Transposes: (height, width, 4) to (length, height, 4).
function resample(source, width, height, length, [support, filter]) {
  const result = new Uint8ClampedArray(length * height * 4), scale = width / length, stretch = Math.max(scale, 1);
  for (let i = 0; i < length; i++) {
    const center = (i + 0.5) * scale, reach = support * stretch, weights = [];
    const first = Math.max(0, Math.trunc(center - reach + 0.5));
    const end = Math.min(width, Math.trunc(center + reach + 0.5));
    for (let x = first; x < end; x++) weights.push(filter((x - center + 0.5) * (1 / stretch)));
    const one = 1 / weights.reduce((a, b) => a + b);
    const fixed = weights.map((v) => Math.trunc(v * one * 2 ** 22 + (v < 0 ? -0.5 : 0.5)));
    for (let y = 0; y < height; y++)
      for (let c = 0; c < 3; c++) {
        let total = 2 ** 21, at = (y * width + first) * 4 + c;
        for (let k = 0; k < fixed.length; k++, at += 4) total += source[at] * fixed[k];
        result[(i * height + y) * 4 + c] = Math.floor(total / 2 ** 22);
      }
  }
  return result;
}

// The model's input of a picture, (1, 3, h, w).
function toTensor(canvas) {
  const { width, height } = canvas, { mean, std, interpolation, crop_mode } = about.preprocessing;
  const { size, offset: [left, top], crop: [w, h] } = place(width, height), filter = FILTERS[interpolation];
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const resized = resample(resample(pixels, width, height, size[0], filter), height, size[0], size[1], filter);
  const values = new Float32Array(3 * h * w);
  for (let c = 0, i = 0; c < 3; c++)
    for (let y = top; y < top + h; y++)
      for (let x = left; x < left + w; x++, i++) {
        const inside = y >= 0 && x >= 0 && y < size[1] && x < size[0];
        const fill = crop_mode === "border" ? roundEven(255 * mean[c]) : 0;
        values[i] = ((inside ? resized[(y * size[0] + x) * 4 + c] : fill) / 255 - mean[c]) / std[c];
      }
  return new ort.Tensor("float32", values, [1, 3, h, w]);
}
const say = (text, className = "") => Object.assign($("status"), { textContent: text, className });
async function classify(file, example) {
  say("Working …");
  for (const button of $("examples").children) button.setAttribute("aria-pressed", button === example);
  await new Promise((done) => setTimeout(done, 30)); // shows the sentence before the work
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" });
  } catch {
    return say(`${file.name} is not a picture that this browser can read. Choose a JPEG, PNG or WebP file.`, "bad");
  }
  const shrink = Math.min(1, Math.sqrt(MAX_PIXELS / (bitmap.width * bitmap.height))), canvas = new OffscreenCanvas(
    Math.max(1, Math.floor(bitmap.width * shrink)), Math.max(1, Math.floor(bitmap.height * shrink)));
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white"; // under transparent pixels
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  try {
    const start = performance.now(), output = await session.run({ images: toTensor(canvas) });
    const logits = Array.from(output.output.data), largest = Math.max(...logits);
    const powers = logits.map((x) => Math.exp(x - largest)), sum = powers.reduce((a, b) => a + b);
    result = { scores: powers.map((x) => x / sum), maps: output.class_maps };
    showPhoto(canvas), showClasses();
    say(`${file.name}, ${Math.round(performance.now() - start)} ms. Choose or drop another picture.`);
  } catch (error) {
    say(`The model failed: ${error.message}`, "bad");
  }
}

// The part of the picture that the model sees, at a higher resolution.
function showPhoto(canvas) {
  const { size, offset, crop: [w, h] } = place(canvas.width, canvas.height), zoom = SIDE / Math.max(w, h);
  $("photo").width = $("map").width = Math.round(w * zoom);
  $("photo").height = $("map").height = Math.round(h * zoom);
  const context = $("photo").getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(canvas, -offset[0] * zoom, -offset[1] * zoom, size[0] * zoom, size[1] * zoom);
  [$("photo").hidden, $("hint").hidden, $("drop").className] = [false, true, "filled"];
}
async function showExample(button) {
  const answer = await fetch(button.value).catch((error) => ({ statusText: error.message }));
  if (!answer.ok) return say(`${button.value} cannot be loaded (${answer.statusText}). Write the folder again.`, "bad");
  await classify(new File([await answer.blob()], button.title), button);
}
function showExamples() {
  const pictures = Array.from({ length: about.examples || 0 }, (_, i) => {
    const name = `Example ${i + 1}`, image = Object.assign(new Image(), { src: `example-${i}.jpg`, alt: name });
    const button = Object.assign(document.createElement("button"), { type: "button", title: name, value: `example-${i}.jpg` });
    button.onclick = () => showExample(button);
    button.append(image);
    return button;
  });
  $("examples").replaceChildren(...pictures);
  $("examples").hidden = !pictures.length;
  return pictures[0] && showExample(pictures[0]);
}
function showClasses() {
  const best = result.scores.map((p, i) => [p, i]).sort((a, b) => b[0] - a[0]).slice(0, TOP);
  [$("without").hidden, $("controls").hidden] = [!!result.maps, !result.maps];
  $("classes").replaceChildren(...best.map(([p, i]) => {
    const item = document.createElement("li"), button = document.createElement("button");
    const [bar, name, percent] = ["bar", "name", "percent"].map((className) =>
      Object.assign(document.createElement("span"), { className }));
    bar.style.width = `${100 * p}%`;
    [name.textContent, percent.textContent] = [className(i), `${(100 * p).toFixed(1)}%`];
    Object.assign(button, { type: "button", value: p, disabled: !result.maps, onclick: () => showMap(i) });
    button.dataset.index = i;
    button.append(bar, name, percent), item.append(button);
    return item;
  }));
  result.maps ? showMap(best[0][1]) : ($("without").textContent = about.without_maps);
}
const className = (i) => (about.classes ? about.classes[i] : `class ${i}`);
const color = (v, at = v * (TURBO.length - 1), i = Math.min(Math.floor(at), TURBO.length - 2)) =>
  TURBO[i].map((low, c) => low + (at - i) * (TURBO[i + 1][c] - low));
function showMap(index) {
  const [, , rows, columns] = result.maps.dims, n = rows * columns;
  const values = result.maps.data.slice(index * n, (index + 1) * n), largest = Math.max(...values);
  const small = new OffscreenCanvas(columns, rows), image = new ImageData(columns, rows), map = $("map");
  for (let i = 0; i < n; i++) {
    const v = largest > 0 ? Math.max(0, values[i]) / largest : 0;
    image.data.set([...color(v), 255 * OPACITY * v], 4 * i);
  }
  small.getContext("2d").putImageData(image, 0, 0);
  const context = map.getContext("2d");
  context.clearRect(0, 0, map.width, map.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(small, 0, 0, map.width, map.height);
  map.hidden = !$("overlay").checked;
  for (const button of $("classes").querySelectorAll("button"))
    button.setAttribute("aria-pressed", button.dataset.index === String(index));
  $("explanation").textContent = largest > 0
    ? `Where the picture raises the score of “${className(index)}”. Choose another class to see its map.`
    : `No part of the picture raises the score of “${className(index)}”.`;
}
function refuse(title, reason, commands) {
  [$("missing-title").textContent, $("reason").textContent, $("commands").textContent] = [title, reason, commands];
  [$("missing").hidden, $("app").hidden] = [false, true];
}
async function start() {
  if (location.protocol === "file:")
    return refuse("Open this page from a server", "Run this in its folder, then open http://localhost:8000.", "python -m http.server");
  try {
    about = await (await fetch("model.json")).json();
  } catch {
    return refuse("model.json cannot be read", "Write the folder again.", WRITE);
  }
  $("model").textContent = document.title = about.model;
  const side = about.preprocessing.input_size.slice(1).join(" × "), names = about.classes || [];
  const some = names.filter((_, i) => i % Math.ceil(names.length / NAMES) === 0).join(", ");
  const such = names.length > NAMES ? `, such as ${some}` : names.length ? `: ${some}` : "";
  $("about").textContent = `${about.num_classes} classes${such}. The model sees ${side} pixels.`;
  try {
    ort = await import(RUNTIME);
    ort.env.wasm.numThreads = 1;
    session = await ort.InferenceSession.create("model.onnx");
  } catch (error) {
    return refuse("The model does not start", `A file is missing or damaged (${error.message}). Write the folder again.`, WRITE);
  }
  const drop = $("drop");
  $("file").onchange = () => $("file").files.length && classify($("file").files[0]);
  $("overlay").onchange = () => ($("map").hidden = !$("overlay").checked);
  drop.ondragover = drop.ondragleave = drop.ondrop = (event) => {
    event.preventDefault();
    drop.classList.toggle("over", event.type === "dragover");
    if (event.type === "drop" && event.dataTransfer.files.length) classify(event.dataTransfer.files[0]);
  };
  $("scale").style.background = `linear-gradient(90deg, ${TURBO.map((c, i) => `rgb(${c.join(" ")} / ${i / (TURBO.length - 1)})`)})`;
  say("Ready.");
  await showExamples();
  document.body.dataset.ready = "yes";
}
start();
