// What a room sees of each slide, all steps shown: the smallest letters in pixels, those inside pictures and
// drawings too, the words, and what is cut. Formulas and buttons have letters of their own; a number is no word.
(() => {
  const inside = (image) => { // a picture says how high its letters were drawn; a drawing is asked for them
    const box = image.getBoundingClientRect();
    const wide = Math.min(box.width, (box.height * image.naturalWidth) / image.naturalHeight); // object-fit: contain
    if (image.dataset.letters) return image.dataset.letters * wide;
    const drawing = new DOMParser().parseFromString(atob(image.src.split(",")[1]), "image/svg+xml");
    const sizes = [...drawing.querySelectorAll("text")].map((text) => parseFloat(text.getAttribute("font-size")));
    return (Math.min(...sizes) * wide) / image.naturalWidth;
  };
  const found = [];
  for (let number = 0; number < Reveal.getTotalSlides(); number++) {
    Reveal.slide(number);
    const section = Reveal.getCurrentSlide(), slide = section.querySelector(".slide");
    for (const step of section.querySelectorAll(".fragment")) step.classList.add("visible");
    const edge = slide.getBoundingClientRect(), cut = new Set();
    const within = (box, what) => {
      const fits = box.left >= edge.left + 20 && box.right <= edge.right - 20 && box.top >= edge.top;
      if (!fits || box.bottom > edge.bottom - 20) cut.add(what);
    };
    let smallest = Infinity, words = 0;
    const texts = document.createTreeWalker(slide, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode, element = text.parentElement;
      if (!text.textContent.trim() || element.closest("math, button")) continue;
      smallest = Math.min(smallest, parseFloat(getComputedStyle(element).fontSize));
      words += text.textContent.split(/[^\p{L}\p{N}_'’.%-]+/u).filter((word) => /\p{L}/u.test(word)).length;
      const range = document.createRange();
      range.selectNodeContents(text);
      for (const box of range.getClientRects()) within(box, text.textContent.trim().slice(0, 40));
    }
    for (const element of slide.querySelectorAll("img, math, pre, table, .timer")) {
      within(element.getBoundingClientRect(), element.tagName);
      if (element.tagName === "IMG") smallest = Math.min(smallest, inside(element));
      if (element.scrollWidth > element.clientWidth + 1 && element.tagName === "PRE") cut.add("a line of the box");
      if (element.tagName === "IMG" && element.getBoundingClientRect().height < 300) cut.add("a small picture");
    }
    for (const part of slide.querySelectorAll(".shown, .words"))
      if (part.scrollHeight > part.clientHeight + 1) cut.add("more than there is room for");
    found.push({ slide: number + 1, title: slide.querySelector("h1, h2").textContent, smallest, words, cut: [...cut] });
  }
  return found;
})()
