"""The page: a form, the sample in the making, and everything made so far. What it does is in `studio.py`."""

import html
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from opensora.registry import PartError
from opensora.utils.errors import UserError
from tools.demo.form import FormValues, form_of, label
from tools.demo.studio import LONGEST_PROMPT, WAITING, Cancelled, Studio, Update

if TYPE_CHECKING:
    import gradio as gr

TITLE = "opensora demo"
LARGEST_SIDE, LONGEST, MOST_STEPS, MOST_GUIDANCE = 1024, 256, 250, 20.0


def build_page(studio: Studio) -> "gr.Blocks":
    """The page of a studio; `launch()` serves it."""
    import gradio as gr

    with gr.Blocks(title=TITLE) as page:
        gr.Markdown(_head(studio))
        with gr.Row():
            with gr.Column(scale=2):
                form = _form(studio)
                with gr.Row():
                    make = gr.Button("Generate", variant="primary", elem_id="generate")
                    cancel = gr.Button("Cancel", variant="stop", elem_id="cancel")
            with gr.Column(scale=3):
                status = gr.HTML(_status("Ready."), elem_id="status")
                preview = gr.Image(
                    label="Preview while it is made", interactive=False, height=190, buttons=[], elem_id="preview"
                )
                video = gr.Video(label="Sample", autoplay=True, loop=True, interactive=False, elem_id="sample")
                sample_image = gr.Image(label="Sample", visible=False, interactive=False, elem_id="sample_image")
        gr.Markdown("### Made so far\nClick one to see its settings.")
        gallery = gr.Gallery(
            value=_gallery(studio),
            columns=4,
            fit_columns=False,
            height=240,
            object_fit="contain",
            show_label=False,
            elem_id="gallery",
        )
        with gr.Accordion("Settings of the chosen sample", open=False):
            again = gr.Button("Put these settings into the form")
            settings = gr.Code(language="json", interactive=False, elem_id="settings")
        chosen = gr.State(None)

        shown = [status, preview, video, sample_image, gallery]
        # the studio lets them take turns, and ends them: a handler that waits in gradio's queue could not be told to
        make.click(_generate(studio), form, shown, concurrency_limit=None)
        cancel.click(_cancel(studio), None, None, queue=False)
        page.unload(_cancel(studio))
        gallery.select(_choose(studio), None, [chosen, settings])
        again.click(_again(studio), [chosen], form)
        page.load(lambda: _gallery(studio), None, [gallery])  # what was made since the page was built
    page.queue(max_size=2 * WAITING)
    return page


def _form(studio: Studio) -> list[Any]:
    """The inputs, in the order of `FormValues`."""
    import gradio as gr

    first, (_, *strides) = studio.first_form(), studio.pipeline.vae.strides
    known = [first, *(form_of(sample.record) for sample in studio.samples())]

    def slider(field: str, least: float, most: float, step: float, label: str, **options: Any) -> Any:
        """As far as `most`, or as what the form begins with or gets from a sample: a slider refuses what is beyond it."""
        values = [value for form in known if (value := getattr(form, field)) is not None]
        return gr.Slider(
            min(least, *values), max(most, *values), getattr(first, field), step=step, label=label, **options
        )

    limit = {"max_length": LONGEST_PROMPT}
    prompt = gr.Textbox(
        first.prompt, label="Prompt", lines=3, placeholder="a white dog on the floor", elem_id="prompt", **limit
    )
    negative = gr.Textbox(
        first.negative_prompt,
        label="Negative prompt",
        info="what to steer away from; needs a guidance other than 1",
        **limit,
    )
    # image_mode=None: the file as it is; another mode would be compressed again
    image = gr.Image(
        first.image, label="First frame (optional)", type="filepath", image_mode=None, height=160, elem_id="image"
    )
    with gr.Row():
        height = slider("height", strides[0], LARGEST_SIDE, strides[0], "Height")
        width = slider("width", strides[1], LARGEST_SIDE, strides[1], "Width")
    with gr.Row():
        num_frames = slider("num_frames", 1, LONGEST, 1, "Frames", info="1 makes an image")
        steps = slider("steps", 1, MOST_STEPS, 1, "Steps", elem_id="steps")
    with gr.Row():
        guidance = slider("guidance", 0, MOST_GUIDANCE, 0.1, "Guidance", info="1 switches it off")
        seed = gr.Number(first.seed, precision=0, label="Seed", info="empty: another one each time")
    return [prompt, negative, image, height, width, num_frames, steps, guidance, seed]


def _generate(studio: Studio) -> Any:
    """The handler of the button: yields values of status, preview, video, image and gallery."""
    import gradio as gr

    def generate(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield _status("Waiting for references, and for those before."), None, None, gr.skip(), gr.skip()
        try:
            for update in studio.make(FormValues(*values), owner=str(request.session_hash)):
                yield _shown(studio, update)
        except Cancelled:
            yield _status("Cancelled."), None, None, gr.skip(), gr.skip()
        except (UserError, PartError) as error:
            yield _status(str(error), bad=True), None, None, gr.skip(), gr.skip()

    return generate


def _shown(studio: Studio, update: Update) -> tuple[Any, ...]:
    """What the outputs become: nothing new where nothing changed."""
    import gradio as gr

    if update.sample is None:
        rest = (update.num_steps - update.step) * update.seconds / update.step
        text = f"Step {update.step} of {update.num_steps}, {rest:.0f} s left."
        preview = gr.skip() if update.preview is None else update.preview
        return _status(text, update.step / update.num_steps), preview, gr.skip(), gr.skip(), gr.skip()
    path = str(update.sample.path)
    still = update.sample.path.suffix in (".png", ".gif")  # what a browser shows as an image
    video = gr.update(value=None if still else path, visible=not still)
    sample_image = gr.update(value=path if still else None, visible=still)
    text = f"Done in {update.seconds:.1f} s: {update.sample.path.name}"
    return _status(text, 1.0), gr.skip(), video, sample_image, _gallery(studio)


def _cancel(studio: Studio) -> Any:
    import gradio as gr

    def cancel(request: gr.Request) -> None:
        studio.cancel(str(request.session_hash))

    return cancel


def _choose(studio: Studio) -> Any:
    import gradio as gr

    def choose(event: gr.SelectData) -> tuple[dict[str, Any] | None, str]:
        wanted = event.value["caption"]  # its place in the gallery may be another's by now
        for sample in studio.samples():
            if label(sample) == wanted:
                return sample.record, json.dumps(sample.record, indent=2, ensure_ascii=False)
        return None, "This sample is no longer in the folder."

    return choose


def _again(studio: Studio) -> Any:
    """The handler that fills the form with the settings of a chosen sample."""
    import gradio as gr

    def again(record: dict[str, Any] | None) -> list[Any]:
        if record is None:
            return [gr.skip()] * len(FormValues._fields)
        form = form_of(record)
        try:
            form = form._replace(image=None if form.image is None else studio.keep_image(form.image))
        except UserError as error:
            gr.Warning(str(error))
            form = form._replace(image=None)
        unknown = [name for name in ("steps", "guidance") if getattr(form, name) is None]
        return [gr.skip() if name in unknown else value for name, value in form._asdict().items()]

    return again


def _gallery(studio: Studio) -> list[tuple[str, str]]:
    return [(str(sample.path), label(sample)) for sample in studio.samples()]


def _head(studio: Studio) -> str:
    model, weights = studio.cfg.model["type"], studio.cfg.model.get("from_pretrained")
    return f"# {TITLE}\n`{model}` with the weights of `{weights}` on `{studio.pipeline.device}`."


def _status(text: str, done: float | None = None, *, bad: bool = False) -> str:
    """A line with a bar, or a message about what went wrong."""
    bar = "" if done is None else f'<progress value="{done:.4f}" max="1" style="width: 100%"></progress>'
    style = "color: #b00020; font-weight: 600" if bad else ""
    return f'<div role="status" style="{style}">{html.escape(text)}</div>{bar}'
